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
  const STOPPED = 424; // the hub's answer for a server that does not run

  let shared = {};
  /** What all extensions of the session share, shared.js, once it is there. */
  let help;
  const helping = import(new URL('shared.js', document.currentScript.src));
  /** The session on the portal, portal.js, once it is there. */
  let portal;
  const loadingPortal = import(new URL('portal.js', document.currentScript.src));
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
   */
  class SessionEnd {
    #modules;
    #changed;
    #show;
    #ended = false;
    #looking = false;
    #offered = false;
    #why = null;

    /**
     * @param modules JupyterLab's modules
     * @param changed the contexts of documents that are not saved
     * @param show shows a few words in place of the time that is left; null: that time again
     */
    constructor(modules, changed, show) {
      this.#modules = modules;
      this.#changed = changed;
      this.#show = show;
    }

    over() {
      return this.#ended;
    }

    /** Whether the session answers, or `STOPPED`. */
    async #answers() {
      try {
        await help.ask(this.#modules.services, 'carme/status');
        return true;
      } catch (error) {
        return error.status === STOPPED ? STOPPED : false;
      }
    }

    async look() {
      if (this.#ended || this.#looking) {
        return;
      }
      this.#looking = true;
      const { Notification } = this.#modules.apputils;
      let notice = null;
      let failed = 0;
      let answer = await this.#answers();
      const wait = async reported => {
        if (!reported && answer === STOPPED) {
          return false;
        }
        failed += 1;
        if (failed > 1) {
          this.#show(say('No answer from this session'));
          // JupyterLab may have to load what shows this, which it cannot now.
          const sentence = say('This session does not answer just now. This page tries again until it does.');
          notice ??= Notification.warning(sentence, { autoClose: false });
        }
        await portal.sleep(LOOK_MS);
        answer = await this.#answers();
        return answer !== true && !this.#ended;
      };
      const reported = answer === true || this.#ended ? null : await portal.untilOver(wait);
      if (reported?.over || (!reported && answer === STOPPED)) {
        this.end(reported);
      }
      if (notice) {
        Notification.dismiss(notice);
        if (!this.#ended) {
          this.#show(null);
        }
      }
      this.#looking = false;
    }

    /** Why it ended, as soon as the portal knows. */
    async #reason(reported) {
      const { sentence } = await portal.untilOver(() => portal.sleep(LOOK_MS), reported);
      return sentence;
    }

    async end(reported) {
      if (this.#ended) {
        return;
      }
      this.#ended = true;
      gate.close();
      this.#show(say('This session has ended'));
      this.#why = this.#reason(reported);
      this.#modules.apputils.Dialog.flush();
      await this.offer();
    }

    /** Offer what is possible after the end, until this page is left or the user stays. */
    async offer() {
      if (this.#offered) {
        return;
      }
      this.#offered = true;
      for (let hint = ''; hint !== null; ) {
        const button = await this.#choose(hint);
        hint = null;
        if (button.label === say('Start Again')) {
          this.#show(say('Starting again'));
          hint = await portal.startAgain();
          this.#show(say('This session has ended'));
        } else if (button.accept) {
          window.location.assign(help.portalPage());
        }
      }
      this.#offered = false;
    }

    /** The button that the user presses. The dialog opens by itself: a key that was meant for a document stays here. */
    async #choose(hint) {
      const { Dialog } = this.#modules.apputils;
      const body = new this.#modules.widgets.Widget({ node: document.createElement('div') });
      const line = document.createElement('p');
      line.style.whiteSpace = 'pre-wrap';
      line.setAttribute('aria-live', 'polite');
      line.textContent = say("The session's page on the portal says why.");
      this.#why.then(sentence => {
        line.textContent = sentence;
      });
      const rest = document.createElement('p');
      const names = this.#changed().map(context => context.path);
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

  /** Save every document that has changed. JupyterLab's own command does not wait.
   *
   * The paths of those that are not saved, once each was saved or could not be.
   */
  async function save(app) {
    const contexts = changedDocuments(app);
    await Promise.allSettled(contexts.map(context => context.save()));
    return contexts.filter(context => !context.isDisposed && context.model.dirty).map(context => context.path);
  }

  /** Warn at once and save every document; what has become of them is a message of its own, once it is known.
   *
   * Not the first message changed: JupyterLab loses a change that comes before it has drawn the message.
   */
  async function warnAndSave(app, { Notification }, sentence, actions) {
    const saving = changedDocuments(app).length > 0;
    const words = saving ? say('Documents are being saved.') : savedWords([]);
    Notification.warning(`${sentence} ${words}`, { autoClose: false, actions });
    if (!saving) {
      return;
    }
    const names = await save(app);
    if (names.length) {
      Notification.error(savedWords(names), { autoClose: false });
    } else {
      Notification.success(savedWords(names), { autoClose: 8000 });
    }
  }

  /** The button in the bar at the top that shows the time; hidden until there is one. */
  function addButton(app, { Widget }, press) {
    const button = document.createElement('button');
    button.className = 'jp-mod-styled jp-mod-minimal';
    button.style.cssText = 'height: 24px; line-height: 24px; margin: 2px 8px 0; white-space: nowrap;';
    button.hidden = true;
    button.addEventListener('click', press);
    const panel = new Widget({ node: document.createElement('div') });
    panel.id = 'carme-session-time';
    panel.node.append(button);
    app.shell.add(panel, 'top', { rank: 1000 });
    return button;
  }

  /** The session's time in the bar, and the warnings before it ends. */
  class SessionTime {
    /** What the session's server reported last. */
    status = {};
    #app;
    #modules;
    #button;
    #warned = new Set();
    #wordsInstead = null;

    constructor(app, modules) {
      this.#app = app;
      this.#modules = modules;
      const { commands } = app;
      const press = () => (this.end.over() ? this.end.offer() : commands.execute('carme:extend'));
      this.#button = addButton(app, modules.widgets, press);
      this.end = new SessionEnd(modules, () => changedDocuments(app), text => {
        this.#wordsInstead = text;
        this.#show();
        for (const command of ['carme:extend', 'carme:stop']) {
          commands.notifyCommandChanged(command);
        }
      });
    }

    async refresh() {
      if (this.#wordsInstead !== null) {
        return; // what watches over the end asks
      }
      try {
        this.status = await help.ask(this.#modules.services, 'carme/status');
      } catch {
        this.end.look();
        return; // the last answer still holds
      }
      this.#show();
    }

    #show() {
      const button = this.#button;
      button.disabled = this.#wordsInstead !== null && !this.end.over();
      if (this.#wordsInstead !== null) {
        button.hidden = false;
        button.textContent = this.#wordsInstead;
        button.title = this.end.over() ? say('Press to start it again, or to go to the portal.') : '';
        button.removeAttribute('aria-label');
        return;
      }
      const ends = this.status.ends && new Date(this.status.ends);
      button.hidden = !ends;
      button.title = say('When this session ends. Press for more time, or to stop it.');
      if (ends) {
        this.#showEnd(ends);
      }
      const idle = this.status.stops_idle && new Date(this.status.stops_idle);
      if (idle && (!ends || idle < ends)) {
        const time = clock(idle);
        const sentence = left =>
          say('Nothing runs in this session. It stops in {left}, at {time}. To go on, run something.', { left, time });
        this.#warn('idle', idle, this.status.warned_idle, sentence, []);
      }
    }

    #showEnd(ends) {
      const extend = () => this.#app.commands.execute('carme:extend');
      const more = this.status.extend
        ? [{ label: say('Extend'), caption: say('Ask for more time'), callback: extend }]
        : [];
      const time = clock(ends);
      this.#button.textContent = say('{left} left', { left: words(minutesUntil(ends)) });
      const label = say('{left} in this session, which ends at {time}', { left: this.#button.textContent, time });
      this.#button.setAttribute('aria-label', label);
      const sentence = left => say('This session ends in {left}, at {time}.', { left, time });
      this.#warn('end', ends, this.status.warned, sentence, more);
    }

    /** Warn of an end at each of the `moments` that the hub names, once. */
    #warn(kind, end, moments, sentence, actions) {
      const passed = (moments || []).filter(moment => new Date(moment) <= Date.now()).length;
      const key = `${kind} ${end.getTime()} ${passed}`;
      if (!passed || this.#warned.has(key)) {
        return;
      }
      this.#warned.add(key);
      const whole = sentence(words(Math.max(1, minutesUntil(end))));
      warnAndSave(this.#app, this.#modules.apputils, whole, actions);
    }
  }

  /** What the dialog about the session's time shows; its value is the minutes that are requested. */
  function timeQuestion({ Widget }, ends) {
    const content = new Widget({ node: document.createElement('div') });
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
    return content;
  }

  /** The session's time, more of it, and its end: the minutes that were requested, or nothing. */
  async function askForTime(commands, { apputils, widgets }, ends) {
    const { Dialog } = apputils;
    const stop = Dialog.warnButton({ label: say('Stop This Session…') });
    const buttons = [stop, Dialog.cancelButton(), Dialog.okButton({ label: say('Extend') })];
    const answer = await showNamed(Dialog, {
      title: say('This session'),
      body: timeQuestion(widgets, ends),
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

  /** Extend the session by so many minutes. */
  async function extend(minutes, { apputils, services }) {
    const { Notification } = apputils;
    try {
      const body = JSON.stringify({ minutes });
      const { ends } = await help.ask(services, 'carme/extend', { method: 'POST', body });
      const sentence = say('This session now ends at {time}.', { time: clock(new Date(ends)) });
      Notification.success(sentence, { autoClose: 8000 });
    } catch (error) {
      Notification.error(error.message, { autoClose: false });
    }
  }

  /** Ask whether the session is to stop, then save all documents and stop it. */
  async function saveAndStop(app, { Dialog, Notification, showDialog }) {
    const { button } = await showDialog({
      title: say('Stop this session?'),
      body: say('All documents are saved first. What is only in the memory of kernels and terminals is lost.'),
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: say('Stop') })]
    });
    if (!button.accept) {
      return;
    }
    try {
      await save(app);
      const names = changedDocuments(app).map(context => context.path); // those that changed meanwhile too
      if (names.length) {
        throw new Error(`${savedWords(names)} ${say('The session goes on. Save or close them, then stop it.')}`);
      }
      await portal.stopSession();
    } catch (error) {
      Notification.error(error.message, { autoClose: false });
    }
  }

  function addCommands(app, palette, modules, time) {
    const { commands } = app;
    commands.addCommand('carme:stop', {
      label: say('Stop This Session…'),
      caption: say('Save all documents, and end the session and its kernels'),
      isEnabled: () => !time.end.over(),
      execute: () => saveAndStop(app, modules.apputils)
    });
    commands.addCommand('carme:extend', {
      label: say('Extend This Session…'),
      caption: say('Ask for more time'),
      isEnabled: () => !time.end.over(),
      execute: async args => {
        const ends = time.status.ends && new Date(time.status.ends);
        const minutes = args.minutes || (await askForTime(commands, modules, ends));
        if (minutes) {
          await extend(minutes, modules);
          await time.refresh();
        }
      }
    });
    if (palette) {
      const category = say('Session');
      palette.addItem({ command: 'carme:extend', category });
      palette.addItem({ command: 'carme:stop', category });
    }
  }

  /** Save when the server is to end: it waits some seconds for its pages to say that all is saved. */
  function saveAtEnd(app, { apputils, services }, end) {
    app.serviceManager.events.stream.connect((_, event) => {
      if (event.schema_id === EVENT && event.state === 'ending') {
        warnAndSave(app, apputils, say('This session is ending.'), [])
          .then(() => help.ask(services, 'carme/saved', { method: 'POST' }))
          .catch(() => undefined)
          .then(() => end.end(null));
      }
    });
  }

  function activate(app, palette, modules) {
    fitPhones();
    const time = new SessionTime(app, modules);
    addCommands(app, palette, modules, time);
    saveAtEnd(app, modules, time.end);

    const query = new URLSearchParams(window.location.search);
    if (query.get('carme-open') === 'terminal') {
      app.restored.then(() => app.commands.execute('terminal:create-new'));
    }

    app.restored.then(() => time.refresh());
    if (window.innerWidth <= PHONE) {
      app.restored.then(() => app.shell.collapseLeft()); // the files would take most of the page
    }
    help.poll(() => time.refresh(), ASK_MS); // nobody need see the page: documents are saved before the end
    // A message of the hub's own would offer to start the server again, without its options and its booking.
    return () => time.end.look();
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
      [help, portal] = await Promise.all([helping, loadingPortal]);
      return help.extension(shared, PACKAGES, plugin);
    }
  };
})();
