// Sorts a table by the column whose head is pressed; what was not measured stays last.

function compareCells(a, b, direction) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const order = isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", { numeric: true }) : a - b;
  return direction * order;
}

function setUpTable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  for (const [column, head] of heads.entries()) {
    head.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.sort;
      const rows = [...body.rows].sort((a, b) => compareCells(key(a), key(b), direction));
      body.replaceChildren(...rows);
      table.classList.remove("grouped");
    });
  }
}
