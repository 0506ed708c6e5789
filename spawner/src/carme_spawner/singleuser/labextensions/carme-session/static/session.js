/* The session's time in JupyterLab: what is left of it, warnings before it ends, more of it, and its end.
 *
 * A container of webpack's module federation written by hand, as shared.js says.
 */
(() => {
  'use strict';

  const ASK_MS = 30000;
  /** The width of a page up to which it is a phone's, in pixels. */
  const PHONE = 600;
  const EXTEND_MINUTES = 60;
  const EVENT = 'https://schema.carme/session';
  const LOOK_MS = 5000;
  /** How often the portal is queried whether a session that is being stopped has ended, by who wants it again. */
  const AGAIN_MS = 1000;
  /** For how long the end of the old session is waited for, and that this page is left, before the question comes again. */
  const END_MS = 60000;
  const LEAVE_MS = 10000;
  const STOPPED = 424; // the hub's answer for a server that does not run

  let shared = {};
  /** What all extensions of the session share, shared.js, once it is there. */
  let help;
  const helping = import(new URL('shared.js', document.currentScript.src));
  const say = (...sentence) => help.say(...sentence);
  const gate = makeGate();

  /** What ends all requests of this page to the session, once it is over.
   *
   * Dozens of parts of JupyterLab and of its extensions ask the server now and then, and keep `fetch` and `WebSocket`
   * for themselves when they are loaded, which is later than this. A request that is never answered makes none of
   * them ask again or complain.
   */
  function makeGate() {
    const { fetch, WebSocket } = window;
    let closed = false;
    const shut = url => closed && new URL(url, window.location.href).pathname.startsWith(help.basePath());

    class Silent extends EventTarget {
      readyState = WebSocket.CONNECTING;
      close() {}
      send() {}
    }

    window.fetch = (input, init) =>
      shut(input instanceof Request ? input.url : input) ? new Promise(() => {}) : fetch(input, init);
    window.WebSocket = class extends WebSocket {
      constructor(url, protocols) {
        if (shut(url)) {
          return new Silent();
        }
        super(url, protocols);
      }
    };
    return {
      close: () => {
        closed = true;
      }
    };
  }

  function sleep(milliseconds) {
    return new Promise(done => setTimeout(done, milliseconds));
  }

  /** 75 minutes as "1 h 15 min". */
  function words(minutes) {
    const hours = Math.floor(minutes / 60);
    return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min`;
  }

  function clock(moment) {
    return moment.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
  }

  function minutesUntil(moment) {
    return Math.max(0, Math.floor((moment - Date.now()) / 60000));
  }

  /** What the portal says of the session: `over` and the `sentence` why; null if it does not answer. */
  async function askPortal() {
    try {
      const response = await fetch(`${help.portalPage()}state/`, { cache: 'no-store', redirect: 'error' });
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
  async function startAgain() {
    const latest = Date.now() + END_MS;
    let reported = await askPortal();
    while (reported && !reported.over) {
      if (Date.now() > latest) {
        return say('The new session has to wait until this one has ended on its nodes. Try again in a minute.');
      }
      await sleep(AGAIN_MS); // what it holds is needed for the new one
      reported = await askPortal();
    }
    if (reported) {
      sendAgain(reported);
    } else {
      window.location.assign(help.portalPage());
    }
    await sleep(LEAVE_MS);
    return say('You are still on the page of the old session.');
  }

  /** Leave this page for the new session's, with the form that starts it. */
  function sendAgain(reported) {
    fresh ??= reported.fresh;
    const form = document.createElement('form');
    form.method = 'post';
    form.action = `${help.portalPage()}again/`;
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
  async function stopSession() {
    const reported = await askPortal();
    if (!reported) {
      throw new Error(say('The portal does not answer, or does not know who you are any more. Sign in there again.'));
    }
    const body = new URLSearchParams({ csrfmiddlewaretoken: reported.token });
    const response = await fetch(`${help.portalPage()}stop/`, { method: 'POST', body, redirect: 'manual' });
    // A redirect may lead to the login as well: the state says whether the session ends.
    const after = response.type === 'opaqueredirect' || response.ok ? await askPortal() : null;
    if (!after || !(after.over || after.state === 'stopping')) {
      throw new Error(say('The portal could not stop this session. Try again in a minute.'));
    }
  }

  /** Show a dialog that has its title as its name: JupyterLab names only those whose body is a text. */
  function showNamed(Dialog, options) {
    const dialog = new Dialog(options);
    dialog.node.setAttribute('aria-label', options.title);
    return dialog.launch();
  }

  /** What watches over the session's end.
   *
   * `look()` is to be called when the session did not answer, `end()` when it is over. The latter says so once, and
   * why, and stops all requests to it. From then on `over()` is true, and `offer()` shows again what is possible.
   *
   * @param changed the contexts of documents that are not saved
   * @param show shows a few words in place of the time that is left; null: that time again
   */
  function makeEnd({ apputils, services, widgets }, changed, show) {
    const { Dialog, Notification } = apputils;
    let ended = false;
    let looking = false;
    let offered = false;
    let why = null;

    /** Whether the session answers, or `STOPPED`. */
    async function answers() {
      try {
        await help.ask(services, 'carme/status');
        return true;
      } catch (error) {
        return error.status === STOPPED ? STOPPED : false;
      }
    }

    async function look() {
      if (ended || looking) {
        return;
      }
      looking = true;
      let notice = null;
      let failed = 0;
      for (let answer = await answers(); answer !== true && !ended; answer = await answers()) {
        const reported = await askPortal();
        if (reported ? reported.over : answer === STOPPED) {
          end(reported);
          break;
        }
        failed += 1;
        if (failed > 1) {
          show(say('No answer from this session'));
          // JupyterLab may have to load what shows this, which it cannot now.
          const sentence = say('This session does not answer just now. This page tries again until it does.');
          notice ??= Notification.warning(sentence, { autoClose: false });
        }
        await sleep(LOOK_MS);
      }
      if (notice) {
        Notification.dismiss(notice);
        if (!ended) {
          show(null);
        }
      }
      looking = false;
    }

    /** Why it ended, as soon as the portal knows. */
    async function reason(reported) {
      while (!reported?.over) {
        await sleep(LOOK_MS);
        reported = await askPortal();
      }
      return reported.sentence;
    }

    async function end(reported) {
      if (ended) {
        return;
      }
      ended = true;
      gate.close();
      show(say('This session has ended'));
      why = reason(reported);
      Dialog.flush();
      await offer();
    }

    /** Offer what is possible after the end, until this page is left or the user stays. */
    async function offer() {
      if (offered) {
        return;
      }
      offered = true;
      for (let hint = ''; hint !== null; ) {
        const button = await choose(hint);
        hint = null;
        if (button.label === say('Start Again')) {
          show(say('Starting again'));
          hint = await startAgain();
          show(say('This session has ended'));
        } else if (button.accept) {
          window.location.assign(help.portalPage());
        }
      }
      offered = false;
    }

    /** The button that the user presses. The dialog opens by itself: a key that was meant for a document stays here. */
    async function choose(hint) {
      const body = new widgets.Widget({ node: document.createElement('div') });
      const line = document.createElement('p');
      line.style.whiteSpace = 'pre-wrap';
      line.setAttribute('aria-live', 'polite');
      line.textContent = say("The session's page on the portal says why.");
      why.then(sentence => {
        line.textContent = sentence;
      });
      const rest = document.createElement('p');
      const names = changed().map(context => context.path);
      const advice = names.length ? ` ${say('Copy what you need before you leave this page.')}` : '';
      rest.textContent = savedWords(names) + advice;
      body.node.append(line, rest);
      if (hint) {
        const answer = Object.assign(document.createElement('p'), { textContent: hint });
        answer.setAttribute('role', 'alert'); // the dialog's focus is on a button
        body.node.append(answer);
      }
      const buttons = [
        Dialog.cancelButton({ label: say('Stay Here') }),
        Dialog.okButton({ label: say('Go to the Portal'), className: 'jp-mod-reject' }),
        Dialog.okButton({ label: say('Start Again'), caption: say('The same image, hardware, time and data') })
      ];
      const { button } = await showNamed(Dialog, { title: say('This session has ended'), body, buttons, defaultButton: 0 });
      return button;
    }

    return { look, end, offer, over: () => ended };
  }

  /** Whether all documents are saved, in words.
   *
   * @param names the paths of those that are not
   */
  function savedWords(names) {
    return names.length ? say('Not saved: {names}.', { names: names.join(', ') }) : say('All documents are saved.');
  }

  /** The contexts of the open documents that have changed. */
  function changedDocuments(app) {
    const contexts = [...app.shell.widgets('main')].map(widget => widget.context);
    const changed = context => context && context.model && context.model.dirty && !context.model.readOnly;
    return [...new Set(contexts.filter(changed))];
  }

  /** On a phone all menus are in the bar, the time has its own place, and rows of a dialog's buttons are kept apart.
   *
   * A panel at a side takes nearly all of a phone's page: beside it documents keep a width of their own, and the page would
   * be wider than the screen, with the panel's tab outside. JupyterLab's dialogs keep the browser's own frame of a dialog,
   * which is left out.
   */
  function fitPhones() {
    const style = document.createElement('style');
    // The menus take all of the bar at the top, so the time stands in the bar at the bottom. The kernel and the place in the
    // document would lie under it; the bell of messages stays.
    style.textContent = `
      dialog.jp-Dialog { border: 0; }
      .jp-Dialog-footerButtons { display: flex; flex-wrap: wrap; justify-content: flex-end; row-gap: 8px; }
      @media (max-width: ${PHONE}px) {
        :root { --jp-sidebar-min-width: min(290px, 100vw - 86px) !important; }
        #jp-main-dock-panel { min-width: 0 !important; }
        #jp-MainMenu .lm-MenuBar-item { padding: 0 3px; }
        #jp-main-statusbar .jp-StatusBar-Item:not(.jp-Notification-Status) { display: none; }
        #carme-session-time { position: fixed !important; inset: auto auto 0 8px !important; width: auto !important; z-index: 1000; }
        .jp-Launcher-content { padding-left: 12px; padding-right: 12px; }
      }`;
    document.head.append(style);
  }

  function activate(app, palette, modules) {
    const { apputils, services, widgets } = modules;
    fitPhones();
    const { commands } = app;
    const { Notification } = apputils;
    let status = {};
    const warned = new Set();

    const button = document.createElement('button');
    button.className = 'jp-mod-styled jp-mod-minimal';
    button.style.cssText = 'height: 24px; line-height: 24px; margin: 2px 8px 0; white-space: nowrap;';
    button.hidden = true;
    button.addEventListener('click', () => (end.over() ? end.offer() : commands.execute('carme:extend')));
    const panel = new widgets.Widget({ node: document.createElement('div') });
    panel.id = 'carme-session-time';
    panel.node.append(button);
    app.shell.add(panel, 'top', { rank: 1000 });

    /** Save every document that has changed. JupyterLab's own command does not wait.
     *
     * The paths of those that are not saved, once each was saved or could not be.
     */
    async function save() {
      const contexts = changedDocuments(app);
      await Promise.allSettled(contexts.map(context => context.save()));
      return contexts.filter(context => !context.isDisposed && context.model.dirty).map(context => context.path);
    }

    /** Warn at once and save every document; what has become of them is a message of its own, once it is known.
     *
     * Not the first message changed: JupyterLab loses a change that comes before it has drawn the message.
     */
    async function warnAndSave(sentence, actions) {
      const saving = changedDocuments(app).length > 0;
      const words = saving ? say('Documents are being saved.') : savedWords([]);
      Notification.warning(`${sentence} ${words}`, { autoClose: false, actions });
      if (!saving) {
        return;
      }
      const names = await save();
      if (names.length) {
        Notification.error(savedWords(names), { autoClose: false });
      } else {
        Notification.success(savedWords(names), { autoClose: 8000 });
      }
    }

    /** Warn of an end at each of the `moments` that the hub names, once. */
    function warn(kind, end, moments, sentence, actions) {
      const passed = (moments || []).filter(moment => new Date(moment) <= Date.now()).length;
      const key = `${kind} ${end.getTime()} ${passed}`;
      if (!passed || warned.has(key)) {
        return;
      }
      warned.add(key);
      warnAndSave(sentence(words(Math.max(1, minutesUntil(end)))), actions);
    }

    let wordsInstead = null;
    const end = makeEnd(modules, () => changedDocuments(app), text => {
      wordsInstead = text;
      show();
      for (const command of ['carme:extend', 'carme:stop']) {
        commands.notifyCommandChanged(command);
      }
    });

    function show() {
      button.disabled = wordsInstead !== null && !end.over();
      if (wordsInstead !== null) {
        button.hidden = false;
        button.textContent = wordsInstead;
        button.title = end.over() ? say('Press to start it again, or to go to the portal.') : '';
        button.removeAttribute('aria-label');
        return;
      }
      const ends = status.ends && new Date(status.ends);
      const idle = status.stops_idle && new Date(status.stops_idle);
      const more = status.extend
        ? [{ label: say('Extend'), caption: say('Ask for more time'), callback: () => commands.execute('carme:extend') }]
        : [];
      button.hidden = !ends;
      button.title = say('When this session ends. Press for more time, or to stop it.');
      if (ends) {
        const time = clock(ends);
        button.textContent = say('{left} left', { left: words(minutesUntil(ends)) });
        const label = say('{left} in this session, which ends at {time}', { left: button.textContent, time });
        button.setAttribute('aria-label', label);
        const sentence = left => say('This session ends in {left}, at {time}.', { left, time });
        warn('end', ends, status.warned, sentence, more);
      }
      if (idle && (!ends || idle < ends)) {
        const time = clock(idle);
        const sentence = left =>
          say('Nothing runs in this session. It stops in {left}, at {time}. To go on, run something.', { left, time });
        warn('idle', idle, status.warned_idle, sentence, []);
      }
    }

    async function refresh() {
      if (wordsInstead !== null) {
        return; // what watches over the end asks
      }
      try {
        status = await help.ask(services, 'carme/status');
      } catch {
        end.look();
        return; // the last answer still holds
      }
      show();
    }

    /** The session's time, more of it, and its end: the minutes that were requested, or nothing. */
    async function askForTime() {
      const content = new widgets.Widget({ node: document.createElement('div') });
      const ends = status.ends && new Date(status.ends);
      const line = document.createElement('p');
      const values = ends && { time: clock(ends), left: words(minutesUntil(ends)) };
      line.textContent = ends ? say('It ends at {time}, in {left}.', values) : say('It has no end yet.');
      const label = document.createElement('label');
      const input = Object.assign(document.createElement('input'), {
        className: 'jp-mod-styled',
        type: 'number',
        min: 1,
        value: EXTEND_MINUTES
      });
      label.style.cssText = 'display: flex; flex-direction: column; gap: 4px;';
      label.append(say('More time for this session, in minutes'), input);
      content.node.append(line, label);
      content.getValue = () => Math.round(Number(input.value));
      const { Dialog } = apputils;
      const stop = Dialog.warnButton({ label: say('Stop This Session…') });
      const buttons = [stop, Dialog.cancelButton(), Dialog.okButton({ label: say('Extend') })];
      const answer = await showNamed(Dialog, {
        title: say('This session'),
        body: content,
        buttons,
        defaultButton: 2,
        focusNodeSelector: 'input'
      });
      if (answer.button.label === stop.label) {
        await commands.execute('carme:stop');
        return 0;
      }
      return answer.button.accept ? answer.value : 0;
    }

    commands.addCommand('carme:stop', {
      label: say('Stop This Session…'),
      caption: say('Save all documents, and end the session and its kernels'),
      isEnabled: () => !end.over(),
      execute: async () => {
        const { Dialog } = apputils;
        const { button } = await apputils.showDialog({
          title: say('Stop this session?'),
          body: say('All documents are saved first. What is only in the memory of kernels and terminals is lost.'),
          buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: say('Stop') })]
        });
        if (!button.accept) {
          return;
        }
        try {
          await save();
          const names = changedDocuments(app).map(context => context.path); // those that changed meanwhile too
          if (names.length) {
            throw new Error(`${savedWords(names)} ${say('The session goes on. Save or close them, then stop it.')}`);
          }
          await stopSession();
        } catch (error) {
          Notification.error(error.message, { autoClose: false });
        }
      }
    });
    commands.addCommand('carme:extend', {
      label: say('Extend This Session…'),
      caption: say('Ask for more time'),
      isEnabled: () => !end.over(),
      execute: async args => {
        const minutes = args.minutes || (await askForTime());
        if (!minutes) {
          return;
        }
        try {
          const body = JSON.stringify({ minutes });
          const { ends } = await help.ask(services, 'carme/extend', { method: 'POST', body });
          const sentence = say('This session now ends at {time}.', { time: clock(new Date(ends)) });
          Notification.success(sentence, { autoClose: 8000 });
        } catch (error) {
          Notification.error(error.message, { autoClose: false });
        }
        await refresh();
      }
    });
    if (palette) {
      const category = say('Session');
      palette.addItem({ command: 'carme:extend', category });
      palette.addItem({ command: 'carme:stop', category });
    }

    // The server is to end, and waits some seconds for its pages to say that all is saved.
    app.serviceManager.events.stream.connect((_, event) => {
      if (event.schema_id === EVENT && event.state === 'ending') {
        warnAndSave(say('This session is ending.'), [])
          .then(() => help.ask(services, 'carme/saved', { method: 'POST' }))
          .catch(() => undefined)
          .then(() => end.end(null));
      }
    });

    const query = new URLSearchParams(window.location.search);
    if (query.get('carme-open') === 'terminal') {
      app.restored.then(() => commands.execute('terminal:create-new'));
    }

    app.restored.then(refresh);
    if (window.innerWidth <= PHONE) {
      app.restored.then(() => app.shell.collapseLeft()); // the files would take most of the page
    }
    setInterval(refresh, ASK_MS);
    // A message of the hub's own would offer to start the server again, without its options and its booking.
    return () => end.look();
  }

  const PACKAGES = ['@jupyterlab/application', '@jupyterlab/apputils', '@jupyterlab/services', '@lumino/widgets'];

  function plugin(application, apputils, services, widgets) {
    return {
      id: 'carme-session:time',
      description: 'How long the session lasts, more time for it, and how it ended.',
      autoStart: true,
      optional: [apputils.ICommandPalette],
      provides: application.IConnectionLost,
      activate: (app, palette) => activate(app, palette, { apputils, services, widgets })
    };
  }

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB['carme-session'] = {
    init: packages => {
      shared = packages;
    },
    get: async () => {
      help = await helping;
      return help.extension(shared, PACKAGES, plugin);
    }
  };
})();
