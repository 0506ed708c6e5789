/* The session on the portal: whether it is over, stopping it, and starting it again.
 *
 * The portal answers also when the session's own server is gone. session.js imports this file.
 */

import { portalPage, say } from './shared.js';

/** How often a page that starts the session again asks the portal whether the old one has ended. */
const AGAIN_MS = 1000;
/** How long to wait for the end of the old session, and for the next page, before the user can press the button again. */
const END_MS = 60000;
const LEAVE_MS = 10000;

export function sleep(milliseconds) {
  return new Promise(done => setTimeout(done, milliseconds));
}

/** What the portal says of the session: `over` and the `sentence` why; null if it does not answer. */
export async function ask() {
  try {
    const response = await fetch(`${portalPage()}state/`, { cache: 'no-store', redirect: 'error' });
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

/** Ask the portal until it says that the session is over. Returns its last answer; null if it gave none.
 *
 * @param between is called with each other answer, before the next question; what resolves to `false` ends the waiting
 * @param reported an answer of the portal that is there already
 */
export async function untilOver(between, reported = null) {
  reported ??= await ask();
  while (!reported?.over && (await between(reported)) !== false) {
    reported = await ask();
  }
  return reported;
}

let fresh = null; // the new session's name: however often this page asks for it, there is one

/** Start the same session again, by the portal alone: the server of this one is gone.
 *
 * The page that follows is the new session's, or the start form with what is not possible now. Where the portal
 * does not answer, or has forgotten who this is, its own page of this session says so. Returns a sentence why the
 * user is still here: the old session goes on, or they stayed for unsaved documents that JupyterLab named.
 */
export async function startAgain() {
  const latest = Date.now() + END_MS;
  // What the old session holds is needed for the new one.
  const reported = await untilOver(answer => (answer && Date.now() <= latest ? sleep(AGAIN_MS) : false));
  if (reported && !reported.over) {
    return say('The new session has to wait until this one has ended on its nodes. Try again in a minute.');
  }
  if (reported) {
    sendAgain(reported);
  } else {
    window.location.assign(portalPage());
  }
  await sleep(LEAVE_MS);
  return say('You are still on the page of the old session.');
}

/** Leave this page for the new session's, with the form that starts it. */
function sendAgain(reported) {
  fresh ??= reported.fresh;
  const form = document.createElement('form');
  form.method = 'post';
  form.action = `${portalPage()}again/`;
  const fields = { csrfmiddlewaretoken: reported.token, name: fresh, then: 'open' };
  for (const [name, value] of Object.entries(fields)) {
    const field = document.createElement('input');
    Object.assign(field, { type: 'hidden', name, value });
    form.append(field);
  }
  document.body.append(form);
  form.submit();
}

/** Stop the session, by the portal; throws an Error with the sentence why that is not possible now. */
export async function stopSession() {
  const reported = await ask();
  if (!reported) {
    throw new Error(say('The portal does not answer, or does not know who you are any more. Sign in there again.'));
  }
  const body = new URLSearchParams({ csrfmiddlewaretoken: reported.token });
  const response = await fetch(`${portalPage()}stop/`, { method: 'POST', body, redirect: 'manual' });
  // A redirect may lead to the login as well: the state says whether the session ends.
  const after = response.type === 'opaqueredirect' || response.ok ? await ask() : null;
  if (!after || !(after.over || after.state === 'stopping')) {
    throw new Error(say('The portal could not stop this session. Try again in a minute.'));
  }
}
