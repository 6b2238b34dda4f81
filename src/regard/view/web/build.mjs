// Bundles the page into bundle/: one script, one style sheet, and the module of the notebook's widget.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { build } from "esbuild";

const folder = import.meta.dirname;
const options = { bundle: true, minify: true, charset: "ascii", target: "es2022", outdir: join(folder, "bundle"), logLevel: "warning" };
const inside = (name) => join(folder, name);

await build({ ...options, entryPoints: { page: inside("main.ts") }, format: "iife" });
await build({ ...options, entryPoints: { widget: inside("data/widget.ts") }, format: "esm" });
await build({ ...options, entryPoints: { page: inside("page.css") } });

// The script stands inside an element of the page, which these would end.
const script = readFileSync(inside("bundle/page.js"), "utf8");
if (/<\/script|<!--/i.test(script)) throw new Error("the page's script contains '</script' or '<!--' and cannot be inlined.");
