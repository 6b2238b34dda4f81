// Asks the page's engine, without a browser: reads questions as JSON, writes each answer as JSON.
import { readFileSync } from "node:fs";
import { build } from "esbuild";

const { folder, layer, raw, sinks, direct, questions } = JSON.parse(readFileSync(0, "utf8"));
const bundle = await build({
  entryPoints: [`${folder}/data/engine.ts`],
  bundle: true,

  format: "esm",
  write: false,
});
const { engine } = await import(
  `data:text/javascript;base64,${Buffer.from(bundle.outputFiles[0].contents).toString("base64")}`
);
const bytes = Object.fromEntries(Object.entries(raw).map(([name, text]) => [name, new TextEncoder().encode(text)]));
const waiting = new Map();
const ask = engine((answer) => waiting.get(answer.id)?.(answer), direct ?? undefined);
void ask({ id: -1, kind: "load", layer: 0, info: layer, raw: bytes, sinks });

function answered(question, id) {
  return new Promise((resolve) => {
    waiting.set(id, resolve);
    void ask({ id, layer: 0, head: 0, hidden: false, ...question });
  });
}

const answers = [];
for (const [at, question] of questions.entries()) {
  if (question.until) {
    let progress;
    do {
      await new Promise((resolve) => setTimeout(resolve, 5));
      progress = await answered(question, 1000 + at);
    } while (progress.done < 1);
    answers.push(progress);
    continue;
  }
  const start = performance.now();
  const answer = await answered(question, at);
  answer.milliseconds = performance.now() - start;
  answers.push({ ...answer, values: answer.values && [...answer.values] });
}
process.stdout.write(JSON.stringify(answers));
