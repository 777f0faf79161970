"use strict";
// Draws the charts of the page's data with uPlot. Everything else on the page is there without it.
(() => {
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const shown = new Set(runs.keys());
  let axis = "step";
  let smoothing = 0;
  const logarithmic = new Set();
  const plots = new Map(); // the element of a chart -> its uPlot
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  const COLOURS = 8;
  const FEW = 40; // a curve with fewer values has a dot at each

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const format = (value) => {
    if (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6)) {
      return value.toLocaleString("en", { maximumSignificantDigits: 5 });
    }
    return Number(value.toPrecision(4)).toExponential();
  };

  const AXES = {
    step: { label: "optimizer step", of: (_, step) => step },
    minutes: { label: "minutes of running time", of: minutesAt },
    samples: { label: "samples", of: (run, step) => step * run.batch },
  };

  /** Minutes for which the run had been running at a step, interpolated. */
  function minutesAt({ steps, minutes }, step) {
    const after = steps.findIndex((each) => each >= step);
    if (after <= 0) return after ? minutes.at(-1) : minutes[0];
    const share = (step - steps[after - 1]) / (steps[after] - steps[after - 1]);
    return minutes[after - 1] + share * (minutes[after] - minutes[after - 1]);
  }

  /** The exponential moving average of the values, without the bias towards a start at 0. */
  function smoothed(values) {
    let sum = 0;
    let weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = smoothing * sum + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return sum / weight;
    });
  }

  /** The table that uPlot draws: x, and what each column is. */
  function table(chart, compares) {
    const series = [];
    const tables = [];
    for (const group of chart.groups) {
      if (!shown.has(group.run)) continue;
      const x = chart.x === "step" ? group.x.map((step) => AXES[axis].of(runs[group.run], step)) : group.x;
      const columns = [x];
      let below = group.x.map(() => 0);
      group.curves.forEach((curve, number) => {
        let values = curve.values;
        if (chart.stacked) {
          values = below = values.map((value, i) => below[i] + (value ?? 0));
        }
        const raw = values;
        const smooths = compares && smoothing > 0 && curve.values.length >= FEW; // few values: evaluations
        if (smooths) values = smoothed(values);
        columns.push(values);
        series.push({ curve, number, run: group.run });
        if (smooths) {
          columns.push(raw);
          series.push({ curve, number, run: group.run, range: "raw" });
          return;
        }
        for (const range of ["low", "high"]) {
          if (curve[range]) {
            columns.push(curve[range]);
            series.push({ curve, number, run: group.run, range });
          }
        }
      });
      tables.push(columns);
    }
    return { data: tables.length ? uPlot.join(tables) : [[]], series };
  }

  function draw(element) {
    const chart = charts[element.dataset.chart];
    plots.get(element)?.destroy();
    plots.delete(element);
    if (!element.clientWidth) return; // in a closed section; drawn once it has a width
    const { data, series } = table(chart, element.dataset.run === undefined);
    if (!series.length) return;
    const compares = runs.length > 1 && element.dataset.run === undefined;
    const x = chart.x === "step" ? axis : chart.x;
    const oneKind = new Set(chart.groups.flatMap((group) => group.curves.map((curve) => curve.label))).size === 1;
    const unit = chart.unit ? ` ${chart.unit}` : "";
    const bands = [];
    const lines = series.map(({ curve, number, run, range }, index) => {
      const kind = chart.groups.filter((group) => group.run === run).findIndex((group) => group.curves.includes(curve));
      const colour = style(`--c${(compares ? run : number + kind) % COLOURS}`);
      if (range === "high") bands.push({ series: [index + 1, index], fill: `${colour}2e` });
      if (chart.stacked && index) bands.push({ series: [index + 1, index], fill: `${colour}40` });
      return {
        label: !compares ? curve.label : oneKind ? runs[run].name : `${runs[run].name}: ${curve.label}`,
        stroke: range === "raw" ? `${colour}40` : range ? "transparent" : colour,
        width: range === "raw" ? 1 : range ? 0 : 1.5,
        dash: DASHES[(compares ? (run >> 3) + kind : Math.max(kind, number % DASHES.length)) % DASHES.length],
        points: { show: !range && curve.values.length < FEW, size: 4 },
        value: (_, __, ___, i) => {
          if (i === null || i === undefined) return "–";
          const at = chart.stacked ? curve.values[i] : plots.get(element)?.data[index + 1][i];
          return at === null || at === undefined ? "–" : format(at) + unit;
        },
        fill: chart.stacked && index === 0 ? `${colour}40` : undefined,
      };
    });
    const look = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
    const options = {
      width: element.clientWidth,
      height: 240,
      scales: {
        x: { time: false },
        y: { distr: logarithmic.has(element) ? 3 : 1, range: chart.stacked ? (_, __, max) => [0, max || 1] : undefined },
      },
      axes: [
        { ...look, label: chart.x === "step" ? AXES[axis].label : "minutes since the start", labelSize: 20, size: 36 },
        { ...look, size: 64, values: (_, splits) => splits.map((value) => (value === null ? "" : format(value))) },
      ],
      series: [{ label: x, value: (_, value) => (value === null ? "–" : format(value)) }, ...lines],
      bands,
      cursor: { dataIdx: (plot, index, hovered) => (index === 0 ? hovered : nearest(plot.data[index], hovered)) },
      legend: { markers: { width: 2, dash: (_, index) => (lines[index - 1]?.dash.length ? "dashed" : "solid") } },
      hooks: { draw: [(plot) => drawRestarts(plot, chart)] },
    };
    const plot = new uPlot(options, data, element);
    plots.set(element, plot);
    if (compares && shown.size > 4) plot.root.querySelector(".u-legend").tabIndex = 0; // it scrolls
    // Without a pointer over the chart, the legend shows the last values.
    const last = data[0].length - 1;
    const showLast = () => plot.setLegend({ idxs: data.map((column, index) => (index ? nearest(column, last) : last)) });
    plot.over.addEventListener("mouseleave", () => setTimeout(showLast));
    setTimeout(showLast); // uPlot draws, and clears its legend, after this task
    // The lines that bound a range have no value of their own to show.
    series.forEach(({ range }, index) => {
      if (range) plot.root.querySelectorAll(".u-legend .u-series")[index + 1].style.display = "none";
    });
  }

  /** The index of the value nearest to a point that may belong to another run. */
  function nearest(values, hovered) {
    for (let distance = 0; distance < values.length; distance++) {
      for (const i of [hovered - distance, hovered + distance]) {
        if (values[i] !== null && values[i] !== undefined) return i;
      }
    }
    return hovered;
  }

  /** A dotted line at each step from which a later attempt continued. */
  function drawRestarts(plot, chart) {
    if (chart.x !== "step") return;
    const context = plot.ctx;
    context.save();
    context.strokeStyle = style("--quiet");
    context.setLineDash([2, 4]);
    for (const run of new Set(chart.groups.map((group) => group.run))) {
      if (!shown.has(run)) continue;
      for (const step of runs[run].restarts) {
        const at = plot.valToPos(AXES[axis].of(runs[run], step), "x", true);
        if (at < plot.bbox.left || at > plot.bbox.left + plot.bbox.width) continue;
        context.beginPath();
        context.moveTo(at, plot.bbox.top);
        context.lineTo(at, plot.bbox.top + plot.bbox.height);
        context.stroke();
      }
    }
    context.restore();
  }

  const elements = [...document.querySelectorAll(".plot")];
  const drawAll = () => elements.forEach(draw);

  const boxes = [...document.querySelectorAll("input[data-run]")];
  const filter = document.getElementById("filter");
  const rowsOf = (run) => [...document.querySelectorAll(`tr[data-run="${run}"]`)];

  /** Shows the runs that are checked and whose rows, in any table, contain all words of the filter. */
  function select() {
    const words = filter?.value.toLowerCase().split(/\s+/) ?? [];
    shown.clear();
    for (const box of boxes) {
      const run = Number(box.dataset.run);
      const text = rowsOf(run).map((row) => row.textContent).join(" ").toLowerCase();
      const matches = words.every((word) => text.includes(word));
      for (const row of rowsOf(run)) row.hidden = !matches;
      if (matches && box.checked) shown.add(run);
      document.getElementById(`run-${run}`).hidden = !shown.has(run);
    }
    drawAll();
  }

  boxes.forEach((box) => box.addEventListener("change", select));
  filter?.addEventListener("input", select);
  document.getElementById("axis")?.addEventListener("change", (event) => {
    axis = event.target.value;
    drawAll();
  });
  document.getElementById("smoothing")?.addEventListener("input", (event) => {
    smoothing = Number(event.target.value);
    drawAll();
  });

  // A click on a column's title sorts the table: by number where both cells begin with one, else by text.
  for (const table of document.querySelectorAll("table:has(tr[data-run])")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.ariaSort === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.ariaSort = down ? "descending" : "ascending";
        const key = (row) => row.cells[column].textContent.trim().replaceAll(",", "");
        const compare = (a, b) => {
          if (!a || !b) return !a - !b; // empty cells last
          const [x, y] = [parseFloat(a), parseFloat(b)];
          const order = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
          return down ? -order : order;
        };
        table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => compare(key(a), key(b))));
      });
    });
  }
  for (const box of document.querySelectorAll("input[data-logarithmic]")) {
    box.addEventListener("change", () => {
      const element = box.closest("figure").querySelector(".plot");
      box.checked ? logarithmic.add(element) : logarithmic.delete(element);
      draw(element);
    });
  }
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = plots.get(target);
      if (!plot && target.clientWidth > 0) draw(target);
      else if (plot && target.clientWidth > 0 && plot.width !== target.clientWidth) plot.setSize({ width: target.clientWidth, height: 240 });
    }
  });
  elements.forEach((element) => resized.observe(element));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("print").addEventListener("change", drawAll);
  drawAll();
})();
