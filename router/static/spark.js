// A line that shows how a figure went; the figure itself stands above it as text.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 34;

/** An empty chart: its node, and what draws a series into it, the last value at the right. */
export function spark() {
  const node = document.createElementNS(SVG, "svg");
  node.setAttribute("preserveAspectRatio", "none");
  node.setAttribute("aria-hidden", "true");
  const [area, line] = ["area", "line"].map((name) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    node.append(path);
    return path;
  });
  const draw = (series) => {
    const width = Math.max(series.length - 1, 1);
    const top = Math.max(...series, 1);
    const points = series.map((value, index) => `${index},${HEIGHT - 1 - (value / top) * (HEIGHT - 3)}`);
    node.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
    area.setAttribute("d", points.length > 1 ? `M0,${HEIGHT}L${points.join("L")}L${width},${HEIGHT}Z` : "");
  };
  return { node, draw };
}
