/* The session's time in JupyterLab: what is left of it, warnings before it ends, and more of it.
 *
 * This is a container of webpack's module federation, written by hand so that it needs no build: JupyterLab calls
 * init() with the packages that it shares, and get() for the plugin.
 */
(() => {
  'use strict';

  const WARN_MINUTES = [15, 5];
  const ASK_MS = 30000;
  const EXTEND_MINUTES = 60;
  const EVENT = 'https://schema.carme/session';

  let shared = {};

  /** The module that JupyterLab itself uses under this name. */
  async function load(name) {
    const versions = Object.values(shared[name] || {});
    const entry = versions.find(version => version.loaded) || versions[0];
    if (!entry) {
      throw new Error(`JupyterLab does not share ${name}.`);
    }
    return (await entry.get())();
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

  /** Ask this server; throws an Error with the sentence that it refused with. */
  async function ask(services, path, init) {
    const settings = services.ServerConnection.makeSettings();
    const url = settings.baseUrl.replace(/\/*$/, '/') + path;
    const response = await services.ServerConnection.makeRequest(url, { cache: 'no-store', ...init }, settings);
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) {
      throw new Error(answer.message || answer.reason || 'The session did not answer. Try again in a minute.');
    }
    return answer;
  }

  function activate(app, palette, modules) {
    const { apputils, services, widgets } = modules;
    const { commands } = app;
    const { Notification } = apputils;
    let status = {};
    const warned = new Set();

    const button = document.createElement('button');
    button.className = 'jp-mod-styled jp-mod-minimal';
    button.style.cssText = 'height: 24px; line-height: 24px; margin: 0 8px; white-space: nowrap;';
    button.hidden = true;
    button.title = 'When this session ends. Press for more time.';
    button.addEventListener('click', () => commands.execute('carme:extend'));
    const panel = new widgets.Widget({ node: document.createElement('div') });
    panel.id = 'carme-session-time';
    panel.node.append(button);
    app.shell.add(panel, 'top', { rank: 1000 });

    /** Save every document that has changed; done when all of them are. JupyterLab's own command does not wait. */
    function save() {
      const changed = [...app.shell.widgets('main')]
        .map(widget => widget.context)
        .filter(context => context && context.model && context.model.dirty && !context.model.readOnly);
      return Promise.allSettled([...new Set(changed)].map(context => context.save()));
    }

    function warn(kind, end, sentence, actions) {
      const left = minutesUntil(end);
      const passed = WARN_MINUTES.filter(minutes => left <= minutes);
      const key = `${kind} ${end.getTime()} ${Math.min(...passed)}`;
      if (!passed.length || warned.has(key)) {
        return;
      }
      warned.add(key);
      save();
      Notification.warning(sentence(words(Math.max(1, left))), { autoClose: false, actions });
    }

    function show() {
      const ends = status.ends && new Date(status.ends);
      const idle = status.stops_idle && new Date(status.stops_idle);
      const more = status.extend
        ? [{ label: 'Extend', caption: 'Ask for more time', callback: () => commands.execute('carme:extend') }]
        : [];
      button.hidden = !ends;
      if (ends) {
        button.textContent = `${words(minutesUntil(ends))} left`;
        button.setAttribute('aria-label', `${button.textContent} in this session, which ends at ${clock(ends)}`);
        warn('end', ends, left => `This session ends in ${left}, at ${clock(ends)}. All documents are saved now.`, more);
      }
      if (idle && (!ends || idle < ends)) {
        const keep = 'Run something to keep it. All documents are saved now.';
        warn('idle', idle, left => `Nothing runs in this session; it is stopped in ${left}, at ${clock(idle)}. ${keep}`, []);
      }
    }

    async function refresh() {
      try {
        status = await ask(services, 'carme/status');
      } catch {
        // The last answer still holds; JupyterLab itself says when the connection is lost.
      }
      show();
    }

    commands.addCommand('carme:extend', {
      label: 'Extend This Session…',
      caption: 'Ask for more time',
      execute: async args => {
        let minutes = args.minutes;
        if (!minutes) {
          const asked = await apputils.InputDialog.getNumber({
            title: 'More time for this session',
            label: 'Minutes',
            value: EXTEND_MINUTES,
            okLabel: 'Extend'
          });
          minutes = asked.button.accept ? Math.round(asked.value) : 0;
        }
        if (!minutes) {
          return;
        }
        try {
          const body = JSON.stringify({ minutes });
          const { ends } = await ask(services, 'carme/extend', { method: 'POST', body });
          Notification.success(`This session now ends at ${clock(new Date(ends))}.`, { autoClose: 8000 });
        } catch (error) {
          Notification.error(error.message, { autoClose: false });
        }
        await refresh();
      }
    });
    if (palette) {
      palette.addItem({ command: 'carme:extend', category: 'Session' });
    }

    // The server was told to end, and waits some seconds for its pages to say that all is saved.
    app.serviceManager.events.stream.connect((_, event) => {
      if (event.schema_id === EVENT && event.state === 'ending') {
        save().then(() => ask(services, 'carme/saved', { method: 'POST' })).catch(() => undefined);
        Notification.warning('This session is ending. All documents are saved now.', { autoClose: false });
      }
    });

    const query = new URLSearchParams(window.location.search);
    if (query.get('carme-open') === 'terminal') {
      app.restored.then(() => commands.execute('terminal:create-new'));
    }

    app.restored.then(refresh);
    setInterval(refresh, ASK_MS);
  }

  async function plugin() {
    const names = ['@jupyterlab/apputils', '@jupyterlab/services', '@lumino/widgets'];
    const [apputils, services, widgets] = await Promise.all(names.map(load));
    return {
      id: 'carme-session:time',
      description: 'How long the session lasts, and more time for it.',
      autoStart: true,
      optional: [apputils.ICommandPalette],
      activate: (app, palette) => activate(app, palette, { apputils, services, widgets })
    };
  }

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB['carme-session'] = {
    init: scope => {
      shared = scope;
    },
    get: async () => {
      const made = await plugin();
      return () => ({ __esModule: true, default: made });
    }
  };
})();
