// pymdownx.arithmatex marks the formulas of a page as \(...\) and \[...\]; KaTeX draws them.
for (const formula of document.querySelectorAll(".arithmatex")) {
  const displayMode = formula.tagName === "DIV";
  katex.render(formula.textContent.trim().slice(2, -2), formula, { displayMode });
}
