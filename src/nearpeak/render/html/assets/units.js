// How quantities are written: the same text as nearpeak.units gives, to the last digit.

const PREFIXES = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
  [1, ""],
  [1e-3, "m"],
  [1e-6, "u"],
  [1e-9, "n"],
];
const SMALLEST_PREFIX = PREFIXES.length - 1;

// Decimals as Python rounds them: toFixed rounds an exact half up, Python to the even digit.
function fixed(value, decimals) {
  const text = value.toFixed(decimals);
  const halves = Math.abs(value) * 10 ** decimals * 2;
  if (Math.abs(halves - Math.round(halves)) > 1e-6) return text; // nowhere near a half; the digits cost time
  const exact = Math.abs(value).toFixed(Math.min(100, decimals + 60));
  const point = exact.indexOf(".");
  const tail = exact.slice(point + 1 + decimals);
  if (!/^50*$/.test(tail)) return text;
  const cut = decimals ? exact.slice(0, point + 1 + decimals) : exact.slice(0, point);
  if (Number(cut[cut.length - 1]) % 2) return text;
  return value < 0 ? `-${cut}` : cut;
}

function exponentOf(value) {
  return Number(value.toExponential().split("e")[1]);
}

function significant(value, digits = 3) {
  if (value === 0) return "0";
  const size = exponentOf(value);
  const kept = Math.max(0, digits - 1 - size);
  if (size >= digits) return fixed(value, 0);
  const text = fixed(value, kept);
  const grown = exponentOf(Number(text)) > size; // 9.999 becomes 10.00: one decimal too many
  return grown && kept > 0 ? fixed(Number(text), kept - 1) : text;
}

function quantity(value, unit, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (value === 0) return `0 ${unit}`;
  if (!Number.isFinite(value)) return `${value > 0 ? "inf" : "-inf"} ${unit}`;
  let at = PREFIXES.findIndex(([scale]) => Math.abs(value) >= scale);
  if (at < 0) at = SMALLEST_PREFIX;
  let text = significant(value / PREFIXES[at][0], digits);
  if (Number(text) >= 1000 && at > 0) {
    at -= 1;
    text = significant(value / PREFIXES[at][0], digits);
  }
  return `${text} ${PREFIXES[at][1]}${unit}`;
}

function seconds(value, digits = 3) {
  return quantity(value, "s", digits);
}

function percent(value, digits = 1) {
  return value === null || value === undefined || Number.isNaN(value) ? "-" : `${fixed(100 * value, digits)} %`;
}

function count(number) {
  const [whole, ...fraction] = String(number).split(".");
  return [whole.replace(/\B(?=(\d{3})+$)/g, ","), ...fraction].join(".");
}

function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
