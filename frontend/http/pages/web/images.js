// Images of a message as data: URLs, made smaller if they are large.

const KEPT = ["image/png", "image/jpeg", "image/webp"];
const MAX_FILE_BYTES = 32 << 20; // a larger file is not read
const MAX_BYTES = 2 << 20; // of an image that is sent as it is
const MAX_SIDE = 2048; // pixels
export const MAX_IMAGES = 8; // of one message

/** Return the data: URL of an image file. Errors: Error that says what was wrong. */
export async function read(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name}: an image may have ${MAX_FILE_BYTES >> 20} MiB`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name}: this browser cannot read it as an image`);
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MAX_BYTES && KEPT.includes(file.type)) {
    bitmap.close();
    return urlOf(file);
  }
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return urlOf(await new Promise(done => canvas.toBlob(done, "image/jpeg", 0.9)));
}

function urlOf(blob) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(new Error("the image was not read"));
    reader.readAsDataURL(blob);
  });
}
