
"use strict";
(() => {
  document.documentElement.classList.add("js");

  // Tables sort by the full number behind each cell; what was not measured stays last; a third press restores the order.
  const key = (row, column) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
  const asNumber = (text) => (text === "inf" ? Infinity : text === "-inf" ? -Infinity : text === "" ? NaN : Number(text));

  function sortTable(table, header, column) {
    const next = { none: "ascending", ascending: "descending", descending: "none" };
    const order = next[header.getAttribute("aria-sort") || "none"];
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    if (order !== "none") header.setAttribute("aria-sort", order);
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const texts = rows.map((row) => key(row, column));
    const numeric = texts.every((text) => text === "" || !Number.isNaN(asNumber(text)));
    const sign = order === "descending" ? -1 : 1;
    rows.sort((a, b) => {
      if (order === "none") return a.dataset.place - b.dataset.place;
      const [x, y] = [key(a, column), key(b, column)];
      if (x === "" || y === "") return (x === "") - (y === "");
      if (!numeric) return sign * x.localeCompare(y, undefined, { numeric: true });
      const [p, q] = [asNumber(x), asNumber(y)];
      return p === q ? 0 : sign * (p < q ? -1 : 1);
    });
    body.append(...rows);
  }

  for (const table of document.querySelectorAll("table[data-sortable]")) {
    [...table.tBodies[0].rows].forEach((row, place) => { row.dataset.place = place; });
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => sortTable(table, header, column));
    });
  }

  const filter = document.getElementById("filter");
  if (filter && document.getElementById("methods")) {
    const buttons = [...document.querySelectorAll("[data-verdict]")];
    const apply = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const wanted = buttons.filter((b) => b.getAttribute("aria-pressed") === "true").map((b) => b.dataset.verdict);
      let shown = 0;
      let all = 0;
      for (const body of document.getElementById("methods").tBodies) {
        let here = 0;
        for (const row of body.querySelectorAll("tr.method")) {
          const has = row.dataset.verdicts.split(" ");
          const fits = words.every((word) => row.dataset.words.includes(word)) && (!wanted.length || wanted.some((v) => has.includes(v)));
          row.hidden = !fits;
          here += fits;
          all += 1;
        }
        body.hidden = here === 0;
        shown += here;
      }
      document.getElementById("shown").textContent = shown === all ? "" : `${shown} of ${all}`;
      document.getElementById("none").hidden = shown > 0;
    };
    filter.addEventListener("input", apply);
    for (const button of buttons) {
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
        apply();
      });
    }
    apply();  // a browser that goes back keeps what was typed
  }

  // Paper unfolds nothing by itself.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => { for (const details of opened) details.open = false; });
})();
