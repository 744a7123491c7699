// The page is whole without this: it only sorts tables by a click on a heading, and opens what is folded for printing.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    button.title = "sort";
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") !== "descending";
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        const difference = Number.isNaN(Number(x)) || Number.isNaN(Number(y)) ? x.localeCompare(y) : x - y;
        return down ? -difference : difference;
      });
      headings.forEach((each) => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...rows);
    });
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
