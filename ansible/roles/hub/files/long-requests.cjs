// Loaded into configurable-http-proxy before it starts: a request may last as long as it needs.
//
// Node.js ends a request whose body has not arrived within five minutes. An upload of gigabytes takes longer, and who
// may send one has been asked before. Headers are still expected within a minute.
"use strict";

const http = require("node:http");
const createServer = http.createServer;

http.createServer = (options, ...rest) =>
  typeof options === "object"
    ? createServer({ ...options, requestTimeout: 0 }, ...rest)
    : createServer({ requestTimeout: 0 }, options, ...rest);
