// Runs the tests of the page's logic. esbuild joins each with the modules that it imports, which are TypeScript.
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { run } from "node:test";
import { dot } from "node:test/reporters";
import { build } from "esbuild";

const here = import.meta.dirname;
const names = readdirSync(here).filter((name) => name.endsWith(".test.mjs"));
const outdir = mkdtempSync(join(tmpdir(), "regard-page-"));
await build({
  entryPoints: names.map((name) => join(here, name)),
  bundle: true,
  format: "esm",
  logLevel: "warning",
  outdir,
  outExtension: { ".js": ".mjs" },
  platform: "node",
  sourcemap: "inline",
});
const counts = { pass: 0, fail: 0 };
const tests = run({ files: names.map((name) => join(outdir, name)), isolation: "none" });
tests.on("test:pass", ({ details }) => (counts.pass += Number(details.type !== "suite")));
tests.on("test:fail", () => counts.fail++);
tests.on("end", () => {
  rmSync(outdir, { recursive: true });
  process.stdout.write(`\n${counts.pass} tests of the page's logic passed, ${counts.fail} failed\n`);
  process.exitCode = counts.fail > 0 || counts.pass === 0 ? 1 : 0;
});
tests.compose(dot).pipe(process.stdout);
