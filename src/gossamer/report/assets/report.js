// Brings the page to life.

function byId(id) {
  return document.getElementById(id);
}

const data = JSON.parse(byId("report-data").textContent);
for (const table of document.querySelectorAll("table.sortable")) setUpTable(table);
if (byId("plan-groups")) setUpGallery(byId("plan-groups"));
setUpVideos(data);
setUpPlots(data);
document.documentElement.dataset.ready = "true";
