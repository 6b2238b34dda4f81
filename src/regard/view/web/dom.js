/** Elements: found by their id, or made. */

/** @param {string} id @returns {HTMLElement} one that index.html has */
export function byId(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag @param {Record<string, unknown>} [properties] or attributes, where there is no such property
 * @param {(Node | string)[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) Object.assign(made, { [name]: value });
    else made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}

/**
 * @template {keyof SVGElementTagNameMap} Name
 * @param {Name} name @param {Record<string, string | number>} attributes
 * @returns {SVGElementTagNameMap[Name]}
 */
export function svgElement(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  return made;
}

/**
 * Words to press, one for each value of a part of the state; controls.js listens to them.
 * @param {string} label @param {string} name of the part @param {Record<string, string>} ways
 * @returns {HTMLElement}
 */
export function choice(label, name, ways) {
  const buttons = Object.entries(ways).map(([value, text]) =>
    element("button", { type: "button", "data-set": `${name}=${value}` }, text),
  );
  return element("span", { role: "group", "aria-label": label }, ...buttons);
}

/** @param {HTMLCanvasElement} canvas @returns {CanvasRenderingContext2D} */
export function context2d(canvas) {
  return /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
}

/**
 * @param {number} width @param {number} height @param {ArrayLike<number>} pixels row by row
 * @param {HTMLCanvasElement} [canvas] that shows them
 * @returns {HTMLCanvasElement} with one pixel for each
 */
export function pixelated(width, height, pixels, canvas = element("canvas")) {
  [canvas.width, canvas.height] = [width, height];
  const image = new ImageData(width, height);
  new Uint32Array(image.data.buffer).set(pixels);
  context2d(canvas).putImageData(image, 0, 0);
  return canvas;
}
