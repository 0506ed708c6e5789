// Loaded into configurable-http-proxy before it starts: how it reaches the servers of sessions.
//
// Node.js checks a server's certificate against the Host header of the request that is passed on, which the browser
// wrote. Here it is checked against the name of the server itself. A session's server is named
// ADDRESS.IDENTITY.session.invalid, where ADDRESS is 10-77-0-3 or the eight groups of an IPv6 address; this name holds
// its address, so nobody is asked for it.
//
// The proxy keeps connections to hub and servers open for the next request, and one that the other side closes just then
// fails. Nobody may repeat a request that changes something, so each of those gets a connection of its own.
"use strict";

const https = require("node:https");
const net = require("node:net");
const tls = require("node:tls");

const SUFFIX = ".session.invalid";
const READ = new Set(["GET", "HEAD", "OPTIONS"]);
const ONCE = new https.Agent({ keepAlive: false });
const connect = tls.connect;
const request = https.request;

https.request = (...all) => {
  const options = all.find((one) => one && typeof one === "object" && "method" in one);
  if (options && options.agent && !READ.has(String(options.method).toUpperCase())) {
    all[all.indexOf(options)] = { ...options, agent: ONCE };
  }
  return request(...all);
};

function lookup(name, options, callback) {
  const parts = name.split(".")[0].split("-");
  const address = parts.join(parts.length === 8 ? ":" : ".");
  const family = net.isIP(address);
  if (!family) {
    callback(new Error(`${name} holds no address`));
  } else if (options.all) {
    callback(null, [{ address, family }]);
  } else {
    callback(null, address, family);
  }
}

tls.connect = (options, ...rest) => {
  const name = options.host;
  if (typeof name !== "string") return connect(options, ...rest);
  const own = { ...options, servername: net.isIP(name) ? "" : name };
  if (name.endsWith(SUFFIX)) own.lookup = lookup;
  return connect(own, ...rest);
};
