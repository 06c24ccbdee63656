// Charts that are hovered, zoomed (drag; double-click resets) and whose lines are switched off in the
// legend. Without it they are the pictures that matplotlib has drawn, from the same points.
(() => {
const NS = document.querySelector("figure.chart svg").namespaceURI;
const element = (name, attributes, text) => {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
const numberText = value => {
  const size = Math.abs(value);
  for (const [least, unit, letter] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (size >= least) return Number((value / unit).toPrecision(4)) + letter;
  return String(Number(value.toPrecision(4)));
};
const ticks = (low, high, most) => {  // round numbers, at most so many
  const least = (high - low) / most, power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 2.5, 5, 10].map(one => one * power).find(one => one >= least * (1 - 1e-9));
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + 1e-9 * step; place++)
    found.push(place * step);
  return found;
};
const powers = (low, high) => {  // of ten, where there are enough of them
  const found = [];
  for (let place = Math.ceil(Math.log10(low)); place <= Math.log10(high); place++) found.push(10 ** place);
  return found.length > 1 ? found : ticks(low, high, 5);
};
const nearest = (points, x) => points.reduce(
  (best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);

class Chart {
  constructor(figure) {
    this.figure = figure;
    Object.assign(this, JSON.parse(figure.querySelector("script").textContent));
    this.hidden = new Set();
    this.range = null;  // of steps, if zoomed
    this.views = [...figure.querySelectorAll("svg[data-box]")].map(svg => this.view(svg));
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.reset = document.createElement("button");
    this.reset.textContent = "all steps";
    this.reset.hidden = true;
    this.reset.onclick = () => this.zoom(null);
    figure.querySelector("figcaption").append(this.reset);
    figure.append(this.tip);
    for (const item of figure.querySelectorAll("[data-lines]")) {
      const switched = () => this.toggle(item);
      item.tabIndex = 0;
      item.setAttribute("role", "switch");
      item.ariaChecked = true;
      item.onclick = switched;
      item.onkeydown = event => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); switched(); }
      };
    }
  }
  toggle(item) {
    const on = item.ariaChecked === "false";
    const together = this.figure.closest(".together") && item.dataset.color;
    for (const chart of together ? charts : [this]) {
      const same = one => together ? one.dataset.color === together : one === item;
      for (const one of [...chart.figure.querySelectorAll("[data-lines]")].filter(same)) one.ariaChecked = on;
      const lines = together ? [...chart.lines.keys()].filter(i => String(chart.lines[i].color) === together)
        : item.dataset.lines.split(" ").map(Number);
      for (const line of lines) chart.hidden[on ? "delete" : "add"](line);
      chart.draw();
    }
  }
  zoom(range) {
    this.range = range;
    this.reset.hidden = range === null;
    this.draw();
  }
  shown() {
    return [...this.lines.entries()].filter(([number]) => !this.hidden.has(number));
  }
  view(svg) {
    const [left, top, width, height] = svg.dataset.box.split(" ").map(Number);
    const [x0, x1, y0, y1] = svg.dataset.range.split(" ").map(Number);
    const name = svg.dataset.name, at = id => svg.getElementById(`${name}-${id}`);
    const view = {svg, left, top, width, height, whole: {x0, x1, y0, y1, log: svg.dataset.log === "1"}};
    view.drawn = element("g", {});
    view.cross = element("g", {});
    view.lines = this.lines.map((_, number) => at(`line${number}`));
    view.marks = this.marks.map((_, number) => at(`mark${number}`));
    view.ticks = svg.querySelectorAll(`[id^="${name}-xtick_"], [id^="${name}-ytick_"]`);
    svg.append(view.drawn, view.cross);
    for (const title of svg.querySelectorAll("title")) title.remove();  // the tip says more
    view.scale = view.whole;
    let start = null;
    const step = event => {
      const box = svg.getBoundingClientRect(), {x0, x1} = view.scale;
      const share = ((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width - left) / width;
      return x0 + Math.min(1, Math.max(0, share)) * (x1 - x0);
    };
    svg.onpointerdown = event => { start = step(event); };
    svg.onpointermove = event => {
      if (!event.buttons) start = null;
      this.hover(view, step(event), start, event);
    };
    svg.onpointerup = event => {
      const ends = [start, step(event)].sort((a, b) => a - b);
      const {x0, x1} = view.scale;
      if (start !== null && ends[1] - ends[0] > 0.02 * (x1 - x0)) this.zoom(ends);
      start = null;
    };
    svg.onpointerleave = () => { view.cross.replaceChildren(); this.tip.hidden = true; };
    svg.ondblclick = () => this.zoom(null);
    return view;
  }
  place(view, x, y) {  // in the picture's units
    const {x0, x1, y0, y1, log} = view.scale, of = log ? Math.log : value => value;
    return [
      view.left + (x - x0) / (x1 - x0) * view.width,
      view.top + (of(y1) - of(y)) / (of(y1) - of(y0)) * view.height,
    ];
  }
  scaled(view) {  // the scale of what is seen
    const whole = view.whole, [x0, x1] = this.range ?? [whole.x0, whole.x1];
    const values = this.shown().flatMap(([, line]) => {
      const inside = line.points.filter(([x]) => x >= x0 && x <= x1);
      return (inside.length ? inside : [nearest(line.points, (x0 + x1) / 2)]).map(([, y]) => y);
    });
    if (!values.length) return {...whole, x0, x1};
    let low = Math.min(...values), high = Math.max(...values);
    const log = whole.log && low > 0;
    if (log) return {x0, x1, y0: low / 1.05, y1: high * 1.05, log};
    const room = 0.05 * (high - low) || 0.05 * Math.abs(high) || 0.5;
    return {x0, x1, y0: whole.y0 === 0 && low >= 0 ? 0 : low - room, y1: high + room, log};
  }
  draw() {
    const original = this.range === null && this.hidden.size === 0;
    for (const view of this.views) {
      view.scale = original ? view.whole : this.scaled(view);
      for (const part of [...view.lines, ...view.ticks]) if (part) part.style.display = original ? "" : "none";
      for (const [number, mark] of view.marks.entries()) if (mark) {
        const {x0, x1} = view.scale, [step] = this.marks[number];
        const [now] = this.place(view, step, view.scale.y1);
        const before = view.left + (step - view.whole.x0) / (view.whole.x1 - view.whole.x0) * view.width;
        mark.style.display = step < x0 || step > x1 ? "none" : "";
        mark.setAttribute("transform", `translate(${now - before} 0)`);
      }
      view.cross.replaceChildren();
      view.drawn.replaceChildren(...(original ? [] : this.drawn(view)));
    }
  }
  drawn(view) {
    const {left, top, width, height, scale} = view, {x0, x1, y0, y1, log} = scale, found = [];
    const text = this.percent ? value => `${Number((100 * value).toPrecision(3))} %` : numberText;
    for (const y of log ? powers(y0, y1) : ticks(y0, y1, 5)) {
      const [, at] = this.place(view, x0, y);
      found.push(element("line", {x1: left, x2: left + width, y1: at, y2: at, class: "grid"}),
        element("text", {x: left - 4, y: at + 3, "text-anchor": "end"}, text(y)));
    }
    for (const x of ticks(x0, x1, width > 400 ? 8 : 5).filter(Number.isInteger))
      found.push(element("text", {x: this.place(view, x, y1)[0], y: top + height + 12, "text-anchor": "middle"}, numberText(x)));
    // A nested svg clips what is outside of the axes.
    const inside = element("svg", {x: left, y: top, width, height, viewBox: `${left} ${top} ${width} ${height}`});
    for (const [, line] of this.shown()) {
      const style = `--line-color: var(--series-${line.color})`;
      const places = line.points.map(([x, y]) => this.place(view, x, y).map(one => one.toFixed(2)));
      if (line.joined) inside.append(element("polyline", {points: places.join(" "), class: line.faint ? "faint" : "", style}));
      if (line.dotted || places.length === 1) for (const [cx, cy] of places)
        inside.append(element("circle", {cx, cy, r: line.joined ? 1.8 : 2.6, style}));
    }
    return [...found, inside];
  }
  hover(view, x, start, event) {
    const lines = this.shown(), {x0, x1} = view.scale;
    if (!lines.length) return;
    const step = nearest(lines.map(([, line]) => nearest(line.points, x)), x)[0];
    const [at] = this.place(view, step, view.scale.y1), {top, left, width, height} = view;
    const parts = [element("line", {x1: at, x2: at, y1: top, y2: top + height, class: "cross"})];
    if (start !== null && event.buttons) {
      const [from, to] = [start, x].map(one => this.place(view, one, view.scale.y1)[0]).sort((a, b) => a - b);
      parts.push(element("rect", {x: from, width: to - from, y: top, height, class: "selected"}));
    }
    const head = document.createElement("b"), rows = [head];
    head.textContent = `step ${step.toLocaleString("en")}`;
    for (const [, line] of lines) {
      const point = nearest(line.points, step), [cx, cy] = this.place(view, ...point);
      if (Math.abs(cx - at) > 0.02 * width) continue;  // this line has nothing near
      parts.push(element("circle", {cx, cy, r: 2.8, style: `--line-color: var(--series-${line.color})`}));
      const row = document.createElement("div"), swatch = document.createElement("i");
      swatch.className = `swatch series${line.color}${line.joined ? "" : " apart"}`;
      const value = this.percent ? `${Number((100 * point[1]).toPrecision(4))} %` : Number(point[1].toPrecision(5));
      row.append(swatch, `${value} ${line.label}${point[0] === step ? "" : `, step ${point[0].toLocaleString("en")}`}`);
      rows.push(row);
    }
    for (const [place, text] of this.marks) {
      if (Math.abs(this.place(view, place, view.scale.y1)[0] - at) > 0.01 * width) continue;
      const row = document.createElement("div");
      row.textContent = text;
      rows.push(row);
    }
    view.cross.replaceChildren(...parts);
    this.tip.replaceChildren(...rows);
    this.tip.hidden = false;
    const box = this.figure.getBoundingClientRect(), right = event.clientX - box.left > box.width / 2;
    this.tip.style.left = right ? "" : `${event.clientX - box.left + 14}px`;
    this.tip.style.right = right ? `${box.right - event.clientX + 14}px` : "";
    this.tip.style.top = `${event.clientY - box.top + 14}px`;
  }
}
const charts = [...document.querySelectorAll("figure.chart")].map(figure => new Chart(figure));
})();
