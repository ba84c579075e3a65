"""Pictures as lists of shapes, written as SVG and PNG."""
