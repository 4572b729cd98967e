// Puts the charts into the page, gives them the colours that the reader prefers, and has keys and buttons move them.
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const still = 1.6; // how much one step zooms
  const finger = 24; // pixels: how far from an action a tap still means it
  const thin = 3; // pixels: narrower boxes are not drawn one by one, since their white edges are all that would be seen
  const charts = [];

  // Bokeh's own parts (tooltips, messages, what is behind a drawing) are each in a shadow root, with light colours of
  // their own; variables of the page reach in there, and follow the scheme.
  const colours = new CSSStyleSheet();
  colours.replaceSync(`:host {
    --color: var(--text); --background-color: var(--page); --divider-color: var(--line); --icon-color: var(--page);
    --tooltip-arrow-color: var(--quiet); color: var(--text); opacity: 1;
  }
  /* Where a tooltip would cover the chart and be cut off; a tap names the action below it. */
  @media (hover: none), (max-width: 600px) { :host(.bk-Tooltip) { display: none; } }`);
  const { attachShadow } = Element.prototype;
  Element.prototype.attachShadow = function attach(options) {
    const root = attachShadow.call(this, options);
    root.adoptedStyleSheets.push(colours);
    return root;
  };

  function dress(plot) {
    const [text, line, paper] = dark.matches ? ["#e8eaed", "#3a4048", "#1b1f24"] : ["#1d2125", "#d5d9de", "#fafbfc"];
    plot.background_fill_color = paper;
    for (const axis of [...plot.below, ...plot.left]) {
      axis.axis_label_text_color = text;
      axis.major_label_text_color = text;
      axis.axis_line_color = line;
      axis.major_tick_line_color = line;
      axis.minor_tick_line_color = null;
    }
    for (const grid of plot.center) grid.grid_line_color = grid.dimension === 0 ? line : null;
  }

  class Chart {
    constructor(element, view) {
      const plot = view.model;
      this.element = element;
      this.plot = plot;
      this.view = view;
      this.surface = view.canvas_view.events_el;
      this.surface.removeAttribute("tabindex"); // the chart around it has a name and takes the keys
      this.range = plot.x_range;
      this.whole = [this.range.start, this.range.end];
      this.at = null;
      this.actions = plot.select_one ? plot.document.get_model_by_name("actions") : null;
      const named = (name) => plot.renderers.find((one) => one.name === name) ?? null;
      [this.numbers, this.boxes, this.shares] = ["numbers", "boxes", "shares"].map(named);
      this.shown = element.querySelector(".shown");
      this.status = element.querySelector(".status");
      dress(plot);
      dark.addEventListener("change", () => dress(plot));
      this.range.change.connect(() => this.moved());
      element.querySelector(".plot").addEventListener("keydown", (event) => this.key(event));
      if (this.actions !== null) this.taps(element.querySelector(".plot"));
      element.querySelector(".tools").addEventListener("click", (event) => {
        const what = event.target.dataset.do;
        if (what) this[what]();
      });
      this.order();
      this.measure();
      this.moved();
    }

    // How long actions that compute typically take: a quarter takes less. The edges that boxes have where there is room.
    measure() {
      if (this.actions === null) return;
      const { data } = this.actions;
      const took = [...data.took].filter((_, i) => "FBDW".includes(data.kind[i])).sort((a, b) => a - b);
      this.typical = took[Math.floor(took.length / 4)] ?? 0;
      this.digits = Math.max(1, ...data.number.map((one) => one.length));
      this.edges = [...data.edge];
    }

    // What N and P walk along: of each stage, its actions in time, the upper row first.
    order() {
      this.rows = new Map();
      if (this.actions === null) return;
      const data = this.actions.data;
      for (let i = 0; i < data.start.length; i += 1) {
        const key = data.stage[i];
        if (!this.rows.has(key)) this.rows.set(key, []);
        this.rows.get(key).push(i);
      }
      const first = data.of[0];
      for (const row of this.rows.values())
        row.sort((a, b) => (data.of[a] !== first) - (data.of[b] !== first) || data.start[a] - data.start[b]);
    }

    set(start, end) {
      const [least, most] = this.whole;
      const width = Math.min(end - start, most - least);
      const from = Math.min(Math.max(start, least), most - width);
      this.range.setv({ start: from, end: from + width });
    }

    zoom(by) {
      const { start, end } = this.range;
      const width = Math.max((end - start) / by, (this.whole[1] - this.whole[0]) / 5000);
      const middle = this.at === null ? (start + end) / 2 : this.middle(this.at);
      const kept = Math.min(Math.max(middle, start), end);
      this.set(kept - ((kept - start) / (end - start)) * width, kept + ((end - kept) / (end - start)) * width);
    }

    middle(i) {
      return (this.actions.data.start[i] + this.actions.data.end[i]) / 2;
    }

    in() { this.zoom(still); }
    out() { this.zoom(1 / still); }
    left() { this.pan(-0.2); }
    right() { this.pan(0.2); }
    reset() { this.set(...this.whole); }

    pan(by) {
      const step = by * (this.range.end - this.range.start);
      this.set(this.range.start + step, this.range.end + step);
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const does = {
        "+": () => this.in(), "=": () => this.in(), "-": () => this.out(), 0: () => this.reset(),
        ArrowLeft: () => this.left(), ArrowRight: () => this.right(),
      };
      if (this.rows.size > 0) {
        Object.assign(does, {
          n: () => this.step(1), p: () => this.step(-1),
          ArrowDown: () => this.stage(1), ArrowUp: () => this.stage(-1),
        });
      }
      const doing = does[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (doing === undefined) return;
      event.preventDefault();
      doing();
    }

    step(by) {
      if (this.at === null) return this.go([...this.rows.values()][0][0]);
      const row = this.rows.get(this.actions.data.stage[this.at]);
      return this.go(row[Math.min(Math.max(row.indexOf(this.at) + by, 0), row.length - 1)]);
    }

    stage(by) {
      if (this.at === null) return this.step(1);
      const data = this.actions.data;
      const row = this.rows.get(data.stage[this.at] + by);
      if (row === undefined) return undefined;
      const like = row.filter((i) => data.of[i] === data.of[this.at]);
      const distance = (i) => Math.abs(this.middle(i) - this.middle(this.at));
      return this.go(like.reduce((best, i) => (distance(i) < distance(best) ? i : best), like[0]));
    }

    // Bokeh's own tap wants a box to be hit, which few fingers do, and dims all others.
    taps(plot) {
      let down = null;
      plot.addEventListener("pointerdown", (event) => { down = event; });
      plot.addEventListener("click", (event) => {
        const dragged = down !== null && Math.hypot(event.clientX - down.clientX, event.clientY - down.clientY) > 8;
        if (!dragged) this.name(this.nearest(event));
      });
    }

    // The action at a point of the screen, or near it; the last drawn lies on top.
    nearest({ clientX, clientY }) {
      const { data } = this.actions, { left, top, width, height } = this.view.frame.bbox;
      const surface = this.surface.getBoundingClientRect(), { start, end } = this.range;
      const [x, y] = [clientX - surface.left - left, clientY - surface.top - top];
      if (x < 0 || x > width || y < 0 || y > height) return null;
      const rows = this.plot.y_range;
      const [across, down] = [width / (end - start), height / (rows.start - rows.end)];
      const outside = (at, from, to) => Math.max(0, from - at, at - to);
      let [best, least] = [null, finger];
      for (let i = 0; i < data.start.length; i += 1) {
        const aside = outside(x, (data.start[i] - start) * across, (data.end[i] - start) * across);
        const above = outside(y, (data.top[i] - rows.end) * down, (data.bottom[i] - rows.end) * down);
        const distance = Math.hypot(aside, above);
        if (distance <= least) [best, least] = [i, distance];
      }
      return best;
    }

    go(i) {
      const { data } = this.actions;
      const width = this.range.end - this.range.start;
      if (data.start[i] < this.range.start || data.end[i] > this.range.end)
        this.set(this.middle(i) - width / 2, this.middle(i) + width / 2);
      this.name(i);
    }

    // Marks the action, and says it below the chart; null: none.
    name(i) {
      const { data } = this.actions;
      this.at = i;
      this.actions.selected.indices = i === null ? [] : [i];
      if (i === null) {
        this.status.textContent = "";
        return;
      }
      const ms = (value) => value.toFixed(2);
      this.status.textContent = `${data.name[i]}: ${data.what[i]}, stage ${data.stage[i]}, ${data.of[i]}, ` +
        `${ms(data.start[i])} to ${ms(data.end[i])} ms`;
    }

    // All charts of a view show the same time; drawing is left for the next frame, as moves come many at a time.
    moved() {
      const { start, end } = this.range;
      for (const other of charts) {
        const twin = other !== this && other.element.dataset.view === this.element.dataset.view;
        if (twin && (other.range.start !== start || other.range.end !== end)) other.range.setv({ start, end });
      }
      if (this.actions === null || this.waiting) return;
      this.waiting = true;
      requestAnimationFrame(() => {
        this.waiting = false;
        this.draw();
      });
    }

    // Boxes with numbers where there is room for them; else the shares of time of what they are.
    draw() {
      const { start, end } = this.range, wide = this.view.frame.bbox.width, across = wide / (end - start);
      if (wide < thin) return this.moved(); // Bokeh has not laid it out yet
      const pixels = this.typical * across;
      const apart = pixels >= thin;
      this.numbers.visible = pixels > 7 * this.digits + 2;
      this.boxes.visible = apart;
      this.shares.visible = !apart;
      const { data } = this.actions;
      const ms = (value) => `${value.toLocaleString("en", { maximumFractionDigits: end - start < 1000 ? 2 : 0 })} ms`;
      const [from, to] = [Math.max(start, 0), Math.min(end, this.last ??= data.end.reduce((last, one) => Math.max(last, one), 0))];
      let said = `Shown: ${ms(from)} to ${ms(to)} of ${ms(this.last)}.`;
      if (apart) {
        const edge = this.edges.map((one, i) => (data.took[i] * across < thin ? data.colour[i] : one));
        if (edge.some((one, i) => one !== data.edge[i])) this.actions.data = { ...data, edge };
      } else {
        const columns = Math.max(1, Math.floor(wide / thin));
        this.shares.data_source.data = this.shared(start, (end - start) / columns, columns);
        said += ` Single actions are too narrow to be drawn: each column is ${ms((end - start) / columns)} wide, and its ` +
          "colours have the heights of their shares of that time. Zoom in to see actions.";
      }
      if (this.shown.textContent !== said) this.shown.textContent = said;
    }

    // Quads: in each column and lane, colours one above the other, as high as their shares of its time.
    shared(start, step, columns) {
      const { data } = this.actions, lanes = new Map();
      for (let i = 0; i < data.start.length; i += 1) {
        const first = Math.max(0, Math.floor((data.start[i] - start) / step));
        const last = Math.min(columns - 1, Math.floor((data.end[i] - start) / step));
        if (last < first) continue;
        const key = `${data.top[i]} ${data.bottom[i]}`;
        if (!lanes.has(key)) lanes.set(key, { i, colours: new Map() });
        const { colours } = lanes.get(key);
        if (!colours.has(data.colour[i])) colours.set(data.colour[i], new Float64Array(columns));
        const sums = colours.get(data.colour[i]);
        for (let at = first; at <= last; at += 1) {
          const [from, to] = [start + at * step, start + (at + 1) * step];
          // An update is a tick, which has no width.
          sums[at] += data.kind[i] === "U" ? step : Math.min(to, data.end[i]) - Math.max(from, data.start[i]);
        }
      }
      const quads = { start: [], end: [], top: [], bottom: [], colour: [], alpha: [] };
      for (const { i, colours } of lanes.values()) {
        const height = data.bottom[i] - data.top[i];
        for (let at = 0; at < columns; at += 1) {
          let bottom = data.bottom[i];
          for (const [colour, sums] of colours) {
            const share = Math.min(sums[at] / step, 1) * height;
            if (share <= 0) continue;
            quads.start.push(start + at * step);
            quads.end.push(start + (at + 1) * step);
            quads.bottom.push(bottom);
            quads.top.push(bottom - share);
            quads.colour.push(colour);
            quads.alpha.push(data.alpha[i]);
            bottom -= share;
          }
        }
      }
      return quads;
    }
  }

  async function show() {
    for (const element of document.querySelectorAll(".chart")) {
      const target = element.querySelector(".plot");
      const item = JSON.parse(element.querySelector("script[type='application/json']").textContent);
      const views = await Bokeh.embed.embed_item(item, target.id);
      charts.push(new Chart(element, [...views.roots][0]));
    }
    for (const button of document.querySelectorAll("button.copy")) {
      button.addEventListener("click", () => {
        getSelection().selectAllChildren(button.parentElement.querySelector("code"));
        button.textContent = document.execCommand("copy") ? "Copied" : "Selected: copy it with Ctrl+C";
      });
    }
    // Bokeh lays charts out after the page, which need not have a new size for that.
    const sized = new ResizeObserver(() => setTimeout(() => charts.forEach((chart) => chart.moved()), 50));
    for (const chart of charts) sized.observe(chart.surface);
    document.documentElement.dataset.ready = "yes";
  }

  show();
})();
