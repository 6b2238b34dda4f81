/** What must be said beside the numbers: rounding, what is left out, what is shown of it. */

import { counted, digits } from "./numbers.js";

/**
 * @param {import("./payload.js").Recording} recording @param {number} layer
 * @returns {string[]}
 */
export function notes(recording, layer) {
  const info = recording.layers[layer];
  const found = [];
  if (info.kind === "map" && info.overview) {
    found.push(
      `Only the small map of this layer is in this file (${info.overview.rows} × ${info.overview.columns} blocks); with all layers it would be too large. Name the layers you want: write_page(recording, path, layers=[${layer}]).`,
    );
  } else if (info.dtype && info.dtype !== "float32") {
    const stored = info.kind === "weights" ? "Weights are" : "Queries and keys are";
    const bits = info.dtype === "float16" ? "16" : "24";
    found.push(
      `${stored} stored in ${bits} bits: weights are within ${digits(info.deviation * 100)} percentage points of the recording, measured on a sample of rows.`,
    );
  }
  if (recording.batch > 1)
    found.push(`The recording holds ${counted(recording.batch, "sequence")}; this is the first.`);
  return found;
}
