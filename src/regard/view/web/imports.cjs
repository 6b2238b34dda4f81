// The order of the page's modules, which dependency-cruiser checks: each imports only from those before it, and none
// imports itself in a circle. Types count, too.
const ORDER = [
  "protocol/",
  "(maths/|dom\\.ts|state\\.ts)",
  "look\\.ts",
  "data/",
  "(view|session)\\.ts",
  "(map|text)/",
  "views/",
  "no_pictures\\.ts",
  "page\\.ts",
];
const from = (level) => `^src/regard/view/web/${level}`;

module.exports = {
  forbidden: [
    { name: "no-circles", severity: "error", from: {}, to: { circular: true } },
    ...ORDER.slice(0, -1).map((level, at) => ({
      name: `order-${at}`,
      comment: `imports.cjs has the order`,
      severity: "error",
      from: { path: from(level) },
      to: { path: ORDER.slice(at + 1).map(from) },
    })),
  ],
  options: { tsPreCompilationDeps: true, tsConfig: { fileName: "src/regard/view/web/tsconfig.json" }, doNotFollow: "node_modules" },
};
