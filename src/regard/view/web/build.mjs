// Bundles the page into bundle/, or into the folder that is named: for recordings without and with pictures, and the
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
// In the place of modules that a page without pictures has no use for stands one that has next to nothing.
const instead = { path: from("no_pictures.ts") };
const unpictured = {
  name: "no pictures",
  setup: (page) => page.onResolve({ filter: /\/(image_view|patches|picture_words)$/ }, () => instead),
};
const pages = {
  page: { html: template.replace(/<!-- pictured -->[^]*?<!-- \/pictured -->/g, ""), plugins: [unpictured] },
  pictured: { html: template, plugins: [] },
};

mkdirSync(to("."), { recursive: true });
for (const [name, { html, plugins }] of Object.entries(pages)) {
  await build({
    ...options,
    plugins,
    entryPoints: [from("page.ts")],
    banner: { js: notice },
    format: "iife",
    outfile: to(`${name}.js`),
  });
  await build({ ...options, entryPoints: [from(`${name}.css`)], outfile: to(`${name}.css`) });
  writeFileSync(to(`${name}.html`), html.replace(/<!-- .*? -->|^\s+/gm, ""));
  // The script stands inside an element of a page in ASCII. esbuild leaves regular expressions as they are.
  if (/<\/script|<!--|[^\0-\x7f]/i.test(readFileSync(to(`${name}.js`), "utf8")))
    throw new Error(`${name}.js contains '</script', '<!--' or a letter outside ASCII and cannot be inlined.`);
}
await build({ ...options, entryPoints: [from("data/widget.ts")], format: "esm", outfile: to("widget.js") });
