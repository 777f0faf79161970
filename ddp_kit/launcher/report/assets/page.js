"use strict";
// Draws the charts of the page's data with uPlot. Everything else on the page is there without it.
(() => {
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const shown = new Set(runs.keys());
  const logarithmic = new Set();
  const plots = new Map(); // the element of a chart -> its uPlot
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  const COLOURS = 8;

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const format = (value) => {
    if (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6)) {
      return value.toLocaleString("en", { maximumSignificantDigits: 5 });
    }
    return Number(value.toPrecision(4)).toExponential();
  };

  /** The table that uPlot draws: x, and what each column is. */
  function table(chart) {
    const series = [];
    const tables = [];
    for (const group of chart.groups) {
      if (!shown.has(group.run)) continue;
      const columns = [group.x];
      let below = group.x.map(() => 0);
      group.curves.forEach((curve, number) => {
        let values = curve.values;
        if (chart.stacked) {
          values = below = values.map((value, i) => below[i] + (value ?? 0));
        }
        columns.push(values);
        series.push({ curve, number, run: group.run, x: group.x });
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
    const { data, series } = table(chart);
    if (!series.length) return;
    const compares = runs.length > 1 && element.dataset.run === undefined;
    const unit = chart.unit ? ` ${chart.unit}` : "";
    const bands = [];
    const lines = series.map(({ curve, number, run, range }, index) => {
      const kind = chart.groups.filter((group) => group.run === run).findIndex((group) => group.curves.includes(curve));
      const colour = style(`--c${(compares ? run : number + kind) % COLOURS}`);
      if (range === "high") bands.push({ series: [index + 1, index], fill: `${colour}2e` });
      if (chart.stacked && index) bands.push({ series: [index + 1, index], fill: `${colour}40` });
      return {
        label: compares ? `${runs[run].name}: ${curve.label}` : curve.label,
        stroke: range ? "transparent" : colour,
        width: range ? 0 : 1.5,
        dash: DASHES[(compares ? (run >> 3) + kind : Math.max(kind, number % DASHES.length)) % DASHES.length],
        points: { show: !range && curve.values.length < 40, size: 4 },
        value: (_, __, ___, i) => {
          if (i === null || i === undefined) return "–";
          const at = chart.stacked ? curve.values[i] : plots.get(element)?.data[index + 1][i];
          return at === null || at === undefined ? "–" : format(at) + unit;
        },
        fill: chart.stacked && index === 0 ? `${colour}40` : undefined,
      };
    });
    const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
    const options = {
      width: element.clientWidth,
      height: 240,
      scales: {
        x: { time: false },
        y: { distr: logarithmic.has(element) ? 3 : 1, range: chart.stacked ? (_, __, max) => [0, max || 1] : undefined },
      },
      axes: [
        { ...axis, label: chart.x === "step" ? "optimizer step" : "minutes since the start", labelSize: 20, size: 36 },
        { ...axis, size: 64, values: (_, splits) => splits.map((value) => (value === null ? "" : format(value))) },
      ],
      series: [{ label: chart.x, value: (_, value) => (value === null ? "–" : format(value)) }, ...lines],
      bands,
      cursor: { dataIdx: (plot, index, hovered) => (index === 0 ? hovered : nearest(plot.data[index], hovered)) },
      legend: { markers: { width: 2, dash: (_, index) => (lines[index - 1]?.dash.length ? "dashed" : "solid") } },
      hooks: { draw: [(plot) => drawRestarts(plot, chart)] },
    };
    const plot = new uPlot(options, data, element);
    plots.set(element, plot);
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
        const at = plot.valToPos(step, "x", true);
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

  for (const box of document.querySelectorAll("input[data-run]")) {
    box.addEventListener("change", () => {
      const run = Number(box.dataset.run);
      box.checked ? shown.add(run) : shown.delete(run);
      document.getElementById(`run-${run}`).hidden = !box.checked;
      drawAll();
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
      if (plot && target.clientWidth > 0 && plot.width !== target.clientWidth) plot.setSize({ width: target.clientWidth, height: 240 });
    }
  });
  elements.forEach((element) => resized.observe(element));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("print").addEventListener("change", drawAll);
  drawAll();
})();
