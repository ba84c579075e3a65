"""Results as text, SVG and JSON: `render(thing) -> str`. No torch."""
