/* The session on the portal: whether it is over, stopping it, and starting it again.
 *
 * The portal answers also when the session's own server is gone. session.js imports this file.
 */

import { portalPage, say } from './shared.js';

/** How often the portal is queried whether a session that is being stopped has ended, by who wants it again. */
const AGAIN_MS = 1000;
/** For how long the end of the old session is waited for, and that this page is left, before the question comes again. */
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

let fresh = null; // the new session's name: however often this page asks for it, there is one

/** Start the same session again, by the portal alone: the server of this one is gone.
 *
 * The page that follows is the new session's, or the start form with what is not possible now. Where the portal
 * does not answer, or has forgotten who this is, its own page of this session says so. Returns a sentence why the
 * user is still here: the old session goes on, or they stayed for unsaved documents that JupyterLab named.
 */
export async function startAgain() {
  const latest = Date.now() + END_MS;
  let reported = await ask();
  while (reported && !reported.over) {
    if (Date.now() > latest) {
      return say('The new session has to wait until this one has ended on its nodes. Try again in a minute.');
    }
    await sleep(AGAIN_MS); // what it holds is needed for the new one
    reported = await ask();
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
