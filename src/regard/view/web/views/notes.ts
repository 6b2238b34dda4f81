/** What must be said beside the numbers: rounding, what is left out, what is shown of it. */

import { counted, digits } from "../maths/numbers";
import { layerName, type Other, type Recording, type Refusal } from "../protocol/recording";
import { meansNotes } from "../text/block_words";
import { pictureNotes } from "../text/picture_words";
import { visible } from "../text/tokens";

const MOST = 5; // names and reasons that are written out

export const NO_KINDS = "The kinds of its heads are not known: some weights of this layer are not numbers (NaN).";

/** @param beside the layer of what stands beside the open one, or is taken away from it */
export function notes(recording: Recording, layer: number, beside: number = layer): string[] {
  const { layers, refused, other } = recording;
  const stage = [...new Set([layer, beside])];
  const found = refusedNotes([...refused, ...(other?.refused ?? [])]);
  if (other) found.push(bothNote(recording, other));
  found.push(...pictureNotes(recording));
  for (const at of stage) if (layers[at].kind === "pyramid") found.push(...meansNotes(layers, at));
  const rounded = stage
    .map((at) => layers[at])
    .filter(({ kind, dtype, deviation }) => kind !== "pyramid" && dtype === "float16" && deviation > 0)
    .sort((one, two) => two.deviation - one.deviation)[0];
  if (rounded) {
    const stored = rounded.kind === "weights" ? "Weights are" : "Queries and keys are";
    const { spacing = 1, deviation } = rounded;
    const measured = spacing > 1 ? `, measured in 1 row of ${spacing}` : "";
    const within = `weights are within ${digits(deviation * 100)} percentage points of the recording${measured}.`;
    found.push(`${stored} stored in 16 bits: ${within}`);
  }
  const { part = null, heads } = layers[layer];
  const name = layerName(layers, layer);
  const one = `Layer ${name} is one window or tile of the picture; the others have a number after the point, too.`;
  if (part !== null) found.push(one);
  if (heads?.includes(null)) found.push(NO_KINDS);
  if (recording.batch > 1) {
    const held = counted(recording.batch, "sequence");
    found.push(`The recording holds ${held}; this is the first. Show another with recording.entry(1).`);
  }
  return found;
}

/** @returns the number of layers that observe refused */
export function countRefused({ refused, other }: Recording): number {
  return namesOf(refused).length + namesOf(other?.refused ?? []).length;
}

/** Which layers are missing and why; layers with the same reason share one note. */
function refusedNotes(refused: Refusal[]): string[] {
  const alike = new Map<string, Refusal[]>();
  for (const each of refused) alike.set(each.reason, [...(alike.get(each.reason) ?? []), each]);
  const said = [...alike.values()].slice(0, MOST).map((some) => {
    const names = namesOf(some);
    const listed = names.slice(0, MOST).map((name) => visible(name));
    const more = names.length > MOST ? ` and ${names.length - MOST} more` : "";
    const verb = names.length === 1 ? "was refused and is" : "were refused and are";
    const [{ line, reason }] = some;
    const at = line && !reason.includes(line) ? ` (${visible(line)})` : "";
    const why = visible(reason.replace(/\s+/g, " "));
    return `${counted(names.length, "layer")} ${verb} missing: ${listed.join(", ")}${more}. Reason${at}: ${why}`;
  });
  if (alike.size > MOST) said.push(`There are ${alike.size - MOST} more reasons in recording.refused.`);
  return said;
}

/** @returns the names of the modules, each once */
function namesOf(refused: Refusal[]): string[] {
  return [...new Set(refused.map(({ module }) => module))];
}

/** What stands beside it, and why two texts of different lengths have no difference. */
function bothNote({ layers }: Recording, { first, title }: Other): string {
  const [one, two] = [layers[0], layers[first]];
  const which = `Each map stands beside that of the same head in “${visible(title)}”.`;
  if (one.q_len === two.q_len && one.kv_len === two.kv_len) return which;
  return `${which} They have ${counted(one.kv_len, "token")} and ${counted(two.kv_len, "token")}, so their cells have no difference.`;
}
