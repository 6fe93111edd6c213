/** Formats numbers, sizes and times for display. */

const GIB = 2 ** 30;

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  if (value < 2 ** 20) return `${number(value / 1024)} KiB`;
  if (value < GIB) return `${number(value / 2 ** 20)} MiB`;
  return `${(value / GIB).toFixed(value < 100 * GIB ? 2 : 0)} GiB`;
}

/** Three significant digits, or thousands with separators. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export function fixed(value, digits = 3) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  if (hours >= 48) return `${Math.round(hours / 24)} days`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

export function dateTime(unixSeconds) {
  return unixSeconds === null || unixSeconds === undefined ? "–" : new Date(unixSeconds * 1000).toLocaleString();
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${number(100 * share)} %`;
}
