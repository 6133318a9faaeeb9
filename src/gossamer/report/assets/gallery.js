// Shows the plans that match every choice.

function setUpGallery(plans) {
  const figures = [...plans.querySelectorAll("figure")];
  const choices = [...document.querySelectorAll("#mask-filters select")];
  const apply = () => {
    for (const figure of figures) {
      figure.hidden = choices.some(({ value, dataset }) => value && figure.dataset[dataset.key] !== value);
    }
    for (const group of plans.children) group.hidden = !group.querySelector("figure:not([hidden])");
    byId("plans-empty").hidden = figures.some((figure) => !figure.hidden);
  };
  for (const choice of choices) choice.addEventListener("change", apply);
}
