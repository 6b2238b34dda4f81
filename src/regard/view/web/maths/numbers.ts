/** Numbers as people read them: three significant digits, shares in percent. */

const THIN = "\u202f"; // narrow no-break space: a number and its unit stay together
const SUPERSCRIPT = ["⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"];

/** Three significant digits, without an exponent where a reader does not need one. */
export function digits(value: number): string {
  if (Number.isNaN(value)) return "not a number";
  if (value === 0) return "0";
  if (Math.abs(value) >= 0.001) {
    const text = value.toPrecision(3);
    return text.includes("e") ? grouped(Math.round(value)) : text;
  }
  const [mantissa, exponent] = value.toExponential(2).split("e");
  const power = String(Math.abs(Number(exponent))).replace(/\d/g, (d) => SUPERSCRIPT[Number(d)]);
  return `${mantissa}${THIN}×${THIN}10⁻${power}`;
}

/** The same without zeros at its end, for the marks of a scale: "2.5", "10". */
export function plain(value: number): string {
  return digits(value).replace(/\.0+$|(\.\d*?)0+$/, "$1");
}

const LEAST = 1e-5; // a share that is written; the line below the map has the digits of a smaller one

/** A weight as a share: "31.2 %". */
export function share(weight: number): string {
  if (weight > 0 && weight < LEAST) return `<0.001${THIN}%`;
  return Number.isNaN(weight) ? "not a number" : `${digits(weight * 100)}${THIN}%`;
}

/** A difference of two shares, in percentage points: "+31.2", "−4.01". */
export function points(difference: number): string {
  const size = digits(Math.abs(difference) * 100);
  return difference === 0 || Number.isNaN(difference) ? size : `${difference < 0 ? "\u2212" : "+"}${size}`;
}

/** A weight with the four digits that are certain, however a file stores its queries and keys. */
export function full(weight: number): string {
  return Number.isNaN(weight) ? "NaN" : String(Number(weight.toPrecision(4)));
}

/** A count with its thousands apart: "2,048". */
export function grouped(count: number): string {
  return String(count).replace(/\B(?=(\d{3})+$)/g, ",");
}

/** "1 token", "9 tokens". */
export function counted(count: number, noun: string): string {
  return `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function lasting(seconds: number): string {
  return seconds < 100 ? `${Math.ceil(seconds)} s` : `${Math.ceil(seconds / 60)} min`;
}
