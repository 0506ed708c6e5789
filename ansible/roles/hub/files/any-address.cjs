// Loaded into configurable-http-proxy before it starts: an address may hold any bytes.
//
// The proxy decodes an address to find its route, and answers 500 where the bytes are no UTF-8, as in names of files that
// older systems wrote. Such an address is decoded byte by byte; what is passed on is the address as it was sent.
"use strict";

const decode = globalThis.decodeURIComponent;
const byte = (_, digits) => String.fromCharCode(parseInt(digits, 16));

globalThis.decodeURIComponent = (text) => {
  try {
    return decode(text);
  } catch (error) {
    if (!(error instanceof URIError)) throw error;
    return String(text).replace(/%([0-9a-f]{2})/gi, byte);
  }
};
