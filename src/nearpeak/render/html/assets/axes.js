// A logarithmic axis: a range of values on a range of pixels, that can be zoomed and moved.

function logAxis(least, most, start, end) {
  const axis = { low: Math.log10(least), high: Math.log10(most), start, end };
  const full = [axis.low, axis.high];
  axis.place = (value) =>
    axis.start + ((Math.log10(value) - axis.low) / (axis.high - axis.low)) * (axis.end - axis.start);
  axis.value = (place) => 10 ** (axis.low + ((place - axis.start) / (axis.end - axis.start)) * (axis.high - axis.low));
  axis.zoom = (factor, place) => {
    const fixedPoint = Math.log10(axis.value(place));
    const width = Math.min(40, Math.max(0.05, (axis.high - axis.low) / factor));
    const share = (fixedPoint - axis.low) / (axis.high - axis.low);
    axis.low = fixedPoint - share * width;
    axis.high = axis.low + width;
  };
  axis.move = (pixels) => {
    const by = (pixels / (axis.end - axis.start)) * (axis.high - axis.low);
    axis.low -= by;
    axis.high -= by;
  };
  axis.reset = () => {
    [axis.low, axis.high] = full;
  };
  // Powers of ten; 2 and 5 times these where there is room for them.
  axis.ticks = () => {
    const decades = axis.high - axis.low;
    const room = Math.abs(axis.end - axis.start);
    const every = Math.max(1, Math.ceil((decades * 44) / room));
    const steps = decades * 150 < room ? [1, 2, 5] : [1];
    const found = [];
    for (let power = Math.floor(axis.low); power <= Math.ceil(axis.high); power += 1) {
      if (power % every) continue;
      for (const step of steps) {
        const value = step * 10 ** power;
        if (Math.log10(value) >= axis.low - 1e-9 && Math.log10(value) <= axis.high + 1e-9) found.push(value);
      }
    }
    return found;
  };
  return axis;
}

// A tick: "10 T", or "0.1" on an axis of plain numbers.
function tickText(value, prefixed) {
  return prefixed ? quantity(value, "", 1).trim() : String(Number(value.toPrecision(1)));
}
