// Small recordings and texts that the tests of the page's logic share.

export const WORDS = ["[CLS]", "Life", " is", " short", ",", " eat", " dessert", " first", " and"];

/** @returns tokens; those in brackets are special */
export function tokens(texts) {
  return texts.map((text) => ({ text, special: /^\[.*\]$/.test(text) }));
}

/** @param more what is unusual about the layer */
export function layer(more = {}) {
  const usual = { name: "layer", kind: "query-key", num_heads: 2, num_kv_heads: 2, q_len: 9, kv_len: 9, head_dim: 4 };
  const units = { scale: 0.5, query_unit: 1, key_unit: 1, value_unit: 1, value_heads: 0, value_dim: 0 };
  return { ...usual, ...units, span_heads: 0, block: 1, heads: null, overview: null, ...more };
}

export function recording(layers = [layer(), layer()], more = {}) {
  return {
    version: 1,
    title: "a title",
    model: "a model",
    layers,
    refused: [],
    opened: { layer: 0, head: 0, query: 0, key: null },
    notable: [],
    ...more,
  };
}
