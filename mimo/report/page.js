// Curves show their values under the pointer, and have a switch for a logarithmic axis.
for (const figure of document.querySelectorAll("figure[data-curves]")) {
  const { plots, curves } = JSON.parse(figure.dataset.curves);
  const images = [...figure.querySelectorAll("img")];
  const line = figure.querySelector(".line"), box = figure.querySelector(".values");
  const shown = () => Math.max(images.findIndex((one) => !one.hidden), 0);
  const input = figure.querySelector("input");
  if (input) {
    input.parentElement.hidden = false;
    input.onchange = () => {
      for (const one of images) one.hidden = one.classList.contains("log") !== input.checked;
    };
  }
  const nearest = (steps, step) =>
    steps.reduce((best, one, at) => (Math.abs(one - step) < Math.abs(steps[best] - step) ? at : best), 0);
  const hide = () => { line.hidden = box.hidden = true; };
  figure.onpointerleave = hide;
  figure.querySelector(".plot").onpointermove = (event) => {
    const area = images[shown()].getBoundingClientRect();
    const { left, right, top, bottom, first, last } = plots[shown()];
    const share = ((event.clientX - area.left) / area.width - left) / (right - left);
    if (share < 0 || share > 1) return hide();
    const at = first + share * (last - first);
    const steps = curves.map((one) => one.steps[nearest(one.steps, at)]);
    const step = steps[nearest(steps, at)];
    box.replaceChildren(`step ${step}`);
    for (const one of curves) {
      const own = nearest(one.steps, step), row = document.createElement("div");
      const value = one.values[own] === null ? "not finite" : one.values[own].toLocaleString("en", { maximumSignificantDigits: 5 });
      const mark = document.createElement("b");
      mark.style.color = one.color;
      mark.textContent = "● ";
      row.append(mark, `${one.name} ${value}${one.steps[own] === step ? "" : ` (step ${one.steps[own]})`}`);
      box.append(row);
    }
    const x = left + ((step - first) / (last - first)) * (right - left);
    line.hidden = box.hidden = false;
    line.style.cssText = `left:${100 * x}%;top:${100 * top}%;height:${100 * (bottom - top)}%`;
    box.style.cssText = x < 0.5 ? `left:calc(${100 * x}% + 10px)` : `right:calc(${100 - 100 * x}% + 10px)`;
  };
}
