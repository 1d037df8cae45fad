// How a figure went: a line with its axes, and under the pointer what it was and when.

import { amount, byId, el, say, span } from "./common.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 40;

/** An empty chart: its node, and what draws a series into it, one value a step, the last one now. */
export function spark() {
  const plot = document.createElementNS(SVG, "svg");
  plot.setAttribute("preserveAspectRatio", "none");
  const [area, line] = ["area", "line"].map((name) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    plot.append(path);
    return path;
  });
  const [most, since, until, told] = ["most", "since", "until", "told"].map((className) => el("span", { className }));
  const cursor = el("div", { className: "cursor" });
  const frame = el("div", { className: "plot" }, plot, cursor);
  const node = el("div", { className: "spark", ariaHidden: "true" }, most, frame, since, told, until);
  let shown = { series: [], step: 1 };

  const draw = (series, step) => {
    shown = { series, step };
    const width = Math.max(series.length - 1, 1);
    const top = Math.max(...series, 1);
    const points = series.map((value, index) => `${index},${HEIGHT - 1 - (value / top) * (HEIGHT - 3)}`);
    plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
    area.setAttribute("d", points.length > 1 ? `M0,${HEIGHT}L${points.join("L")}L${width},${HEIGHT}Z` : "");
    say(most, points.length > 1 ? amount(top) : "");
    say(since, points.length > 1 ? `−${span(width * step)}` : "");
    say(until, points.length > 1 ? "now" : "");
  };
  frame.addEventListener("pointermove", (event) => {
    const { series, step } = shown;
    if (series.length < 2) return;
    const box = frame.getBoundingClientRect();
    const last = series.length - 1;
    const index = Math.round(Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * last);
    cursor.style.left = `${(100 * index) / last}%`;
    node.classList.add("pointed");
    say(told, `${amount(series[index])}, ${index === last ? "now" : `${span((last - index) * step)} ago`}`);
  });
  frame.addEventListener("pointerleave", () => {
    node.classList.remove("pointed");
    say(told, "");
  });
  return { node, draw };
}

/** The buttons that choose how long the curves are; calls `changed`, and returns what is chosen. */
export function periods(changed) {
  const buttons = [byId("minutes"), byId("hour")];
  let chosen = buttons[0].id;
  for (const button of buttons) {
    button.addEventListener("click", () => {
      chosen = button.id;
      for (const each of buttons) each.ariaPressed = String(each === button);
      changed();
    });
  }
  return (board) => (chosen === "hour" ? [board.hour, board.hour_step_s] : [board.history, board.step_s]);
}
