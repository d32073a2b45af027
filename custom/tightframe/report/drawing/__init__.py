"""Parts of pages: escaping markup, plots as SVG, the page layout."""
