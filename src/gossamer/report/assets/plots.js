// Draws the figures in the colours of the page, and again when the theme changes.

const PLOT_OPTIONS = { responsive: true, displayModeBar: false, displaylogo: false };

function themed(figure) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const { data, layout } = structuredClone(figure);
  for (const trace of data) {
    if (trace.type === "heatmap") {
      trace.colorscale = [0, 0.5, 1].map((at, step) => [at, colour(`${trace.meta.scale}-${step}`)]);
    } else {
      const own = colour(`series-${trace.meta.series}`);
      trace.marker.color = trace.line.color = trace.error_y.color = own;
    }
  }
  for (const axis of [layout.xaxis, layout.yaxis]) {
    Object.assign(axis, { gridcolor: colour("line"), linecolor: colour("line"), zerolinecolor: colour("line") });
    Object.assign(axis, { automargin: true, fixedrange: true });
    axis.title.font = { size: 13 };
  }
  for (const shape of layout.shapes ?? []) shape.line.color = colour("soft");
  Object.assign(layout, {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: colour("sans"), size: 13, color: colour("soft") },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
  });
  return { data, layout };
}

function draw(element, figure) {
  element.hidden = !figure;
  if (!figure) return Plotly.purge(element);
  const { data, layout } = themed(figure);
  return Plotly.react(element, data, layout, PLOT_OPTIONS);
}

function setUpPlots({ quality, heat }) {
  const qualityPlot = byId("quality-plot");
  const heatChoice = byId("heat-variant");
  const drawQuality = () => {
    const chosen = document.querySelector('input[name="measure"]:checked');
    if (chosen) draw(qualityPlot, quality[chosen.value]);
  };
  const drawHeat = () => {
    if (!heatChoice) return;
    const { density, rel_l2: error } = heat[Number(heatChoice.value)];
    draw(byId("heat-density"), density);
    draw(byId("heat-error"), error);
    byId("heat-error-note").hidden = Boolean(error);
  };
  for (const button of document.querySelectorAll('input[name="measure"]')) {
    button.addEventListener("change", drawQuality);
  }
  heatChoice?.addEventListener("change", drawHeat);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    drawQuality();
    drawHeat();
  });
  drawQuality();
  drawHeat();
}
