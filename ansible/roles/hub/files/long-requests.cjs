// Loaded into configurable-http-proxy before it starts: a request may last as long as it needs.
//
// Node.js ends a request whose body has not arrived within five minutes. An upload of gigabytes takes longer, and who
// may send one has been asked before. Without that limit Node.js has none for headers either, unless it is given one:
// they are still expected within a minute.
"use strict";

const http = require("node:http");
const createServer = http.createServer;
const limited = (options) => ({ headersTimeout: 60_000, ...options, requestTimeout: 0 });

http.createServer = (options, ...rest) =>
  typeof options === "object"
    ? createServer(limited(options), ...rest)
    : createServer(limited({}), options, ...rest);
