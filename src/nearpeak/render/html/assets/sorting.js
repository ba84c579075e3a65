// Sorting 100,000 rows in a few milliseconds: by digits of the key's bits, stable, without comparisons.

// The places of `keys` (Float64Array) in ascending order; what is not a number comes last.
function orderOf(keys, descending = false) {
  const size = keys.length;
  const bits = new Uint32Array(new Float32Array(keys).buffer);
  for (let i = 0; i < size; i += 1) {
    const key = keys[i];
    if (key !== key) {
      bits[i] = 0xffffffff;
      continue;
    }
    const raw = bits[i];
    const ascending = (raw & 0x80000000 ? ~raw : raw | 0x80000000) >>> 0;
    bits[i] = descending ? ~ascending >>> 0 : ascending;
  }
  let order = new Uint32Array(size);
  for (let i = 0; i < size; i += 1) order[i] = i;
  let other = new Uint32Array(size);
  for (const [shift, digits] of [
    [0, 2048],
    [11, 2048],
    [22, 1024],
  ]) {
    const starts = new Uint32Array(digits + 1);
    const mask = digits - 1;
    for (let i = 0; i < size; i += 1) starts[((bits[i] >>> shift) & mask) + 1] += 1;
    for (let i = 0; i < digits; i += 1) starts[i + 1] += starts[i];
    for (let i = 0; i < size; i += 1) {
      const at = order[i];
      const digit = (bits[at] >>> shift) & mask;
      other[starts[digit]] = at;
      starts[digit] += 1;
    }
    [order, other] = [other, order];
  }
  return order;
}

// For each text its place in the alphabet, as a key to sort by.
function alphabetical(texts) {
  const order = Array.from(texts.keys()).sort((a, b) => (texts[a] < texts[b] ? -1 : texts[a] > texts[b] ? 1 : 0));
  const ranks = new Float64Array(texts.length);
  order.forEach((at, rank) => {
    ranks[at] = rank;
  });
  return ranks;
}
