// What both pages share: elements, and numbers as people read them.

/** An element with properties and children; strings become text. */
export function el(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** Set text only where it differs, so that a screen reader's place is kept. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function byId(id) {
  return document.getElementById(id);
}

/** The URL of a path of this server, wherever a proxy has put it. */
export function urlOf(path) {
  return new URL(`../../${path}`, import.meta.url);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 ms";
  if (value < 0.001) return `${(value * 1000).toFixed(2)} ms`;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${value.toFixed(0)} s`;
}

export function amount(value) {
  const digits = value < 10 && !Number.isInteger(value) ? 1 : 0;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const at = value < 1 ? 0 : Math.min(Math.floor(Math.log10(value) / 3), units.length - 1);
  return `${amount(value / 1000 ** at)} ${units[at]}`;
}

export function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}

export function span(value) {
  if (value < 100) return `${Math.round(value)} s`;
  if (value < 6000) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} days`;
}
