// Bundles the page into bundle/, or into the folder that is named: as a whole, as the small page of one head, and the
// module of the notebook's widget.
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { build } from "esbuild";

const from = (name) => join(import.meta.dirname, name);
const to = (name) => join(process.argv[2] ?? from("bundle"), name);
// The page's own code has no notice; that of the signals asks for its own to go with every copy.
const licence = readFileSync(from("../../../../node_modules/@preact/signals-core/LICENSE"), "utf8");
const notice = `/*! @preact/signals-core. ${licence.trim().replace(/\s+/g, " ")} */`;
const options = { bundle: true, minify: true, charset: "ascii", target: "es2022", logLevel: "warning" };
const template = readFileSync(from("index.html"), "utf8");
const pages = {
  page: template.replace(/<!-- \/?full -->/g, ""),
  small: template.replace(/<!-- full -->[^]*?<!-- \/full -->/g, ""),
};
// In the small page small_page.ts stands in the place of these modules.
const absent = /\/(full_page|block_words|saving|pass|patches|picture_words)$/;
const small = {
  name: "small",
  setup: (page) => page.onResolve({ filter: absent }, () => ({ path: from("small_page.ts") })),
};

mkdirSync(to("."), { recursive: true });
for (const [name, html] of Object.entries(pages)) {
  const plugins = name === "small" ? [small] : [];
  await build({
    ...options,
    plugins,
    entryPoints: [from("main.ts")],
    banner: { js: notice },
    format: "iife",
    outfile: to(`${name}.js`),
  });
  await build({ ...options, entryPoints: [from(`${name}.css`)], outfile: to(`${name}.css`) });
  writeFileSync(to(`${name}.html`), html.replace(/^\s+/gm, ""));
  // The script stands inside an element of a page in ASCII. esbuild leaves regular expressions as they are.
  if (/<\/script|<!--|[^\0-\x7f]/i.test(readFileSync(to(`${name}.js`), "utf8")))
    throw new Error(`${name}.js contains '</script', '<!--' or a letter outside ASCII and cannot be inlined.`);
}
await build({ ...options, entryPoints: [from("data/widget.ts")], format: "esm", outfile: to("widget.js") });
