"""Parts that pages are drawn with: markup that escapes, plots as SVG, the page around them."""
