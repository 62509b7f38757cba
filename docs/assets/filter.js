// A field above the tables of a long page that hides the rows without the words that are typed.
document$.subscribe(() => {
  const tables = [...document.querySelectorAll(".md-typeset table:not([class])")];
  const count = tables.reduce((sum, table) => sum + table.tBodies[0].rows.length, 0);
  if (count < 40) return;
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = `Filter the ${count} rows of this page`;
  field.className = "row-filter";
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const table of tables) {
      let name = "";
      for (const row of table.tBodies[0].rows) {
        name = row.cells[0].textContent.trim() || name; // a name stands in the first of its rows alone
        const text = `${name} ${row.textContent}`.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    }
  });
  document.querySelector(".md-typeset h1").after(field);
});
