for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const descending = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const key = row => row.cells[head.cellIndex].dataset.sort ?? row.cells[head.cellIndex].textContent.trim();
    const order = new Intl.Collator(undefined, { numeric: false });
    const compare = (a, b) => isNaN(a) || isNaN(b) || a === "" || b === "" ? order.compare(a, b) : a - b;
    const rows = [...body.rows].sort((a, b) => compare(key(a), key(b)));
    body.append(...(descending ? rows.reverse() : rows));
  });
}
