/* JupyterLab as the session's home: tiles in the launcher for its apps, examples, the portal and help, and the hub's
 * menu entry, which leads to the portal.
 *
 * A container of webpack's module federation written by hand, as carme-session/static/shared.js says.
 */
(() => {
  'use strict';

  /** Where the tiles are in the launcher: below the notebooks, which JupyterLab has at 0, and above its consoles at 20. */
  const SESSION = 5;
  const EXAMPLES = 10;
  const TERMINAL = 'terminal:create-new';
  const HELP = '/help/';
  /** How often apps of the user's own are looked for while somebody sees the page. */
  const ASK_MS = 60000;
  /** How often a theme's stylesheet is requested again, and after how long; each time it takes longer. */
  const THEME_TRIES = 4;
  const THEME_MS = 500;
  const STYLE = `
    .carme-examples { overflow: auto; padding: 16px 24px; color: var(--jp-ui-font-color1); background: var(--jp-layout-color1); }
    .carme-examples h1 { font-size: 1.6em; margin: 0 0 4px; }
    .carme-examples ul { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 12px; list-style: none; padding: 0; }
    .carme-examples button { display: flex; flex-direction: column; width: 100%; height: 100%; text-align: left; padding: 12px 14px; font: inherit; color: inherit; cursor: pointer; background: var(--jp-layout-color1); border: 1px solid var(--jp-border-color1); border-radius: 6px; }
    .carme-examples button:hover, .carme-examples button:focus-visible { border-color: var(--jp-brand-color1); outline: 2px solid var(--jp-brand-color1); }
    .carme-examples strong { display: block; font-size: 1.1em; margin-bottom: 4px; }`;

  /** Drawings of 24 by 24 in the colour of the launcher's own. */
  const DRAWINGS = {
    portal: 'M4 4h7v7H4zM13 4h7v7h-7zM4 13h7v7H4zM13 13h7v7h-7z',
    help: 'M11 18h2v-2h-2zm1-16a10 10 0 1 0 0 20 10 10 0 0 0 0-20zm0 18a8 8 0 1 1 0-16 8 8 0 0 1 0 16zm0-14a4 4 0 0 0-4 4h2a2 2 0 1 1 4 0c0 2-3 1.75-3 5h2c0-2.25 3-2.5 3-5a4 4 0 0 0-4-4z',
    examples: 'M18 2H6a2 2 0 0 0-2 2v16a2 2 0 0 0 2 2h12a2 2 0 0 0 2-2V4a2 2 0 0 0-2-2zM6 4h5v8l-2.5-1.5L6 12z',
    app: 'M19 4H5a2 2 0 0 0-2 2v12a2 2 0 0 0 2 2h14a2 2 0 0 0 2-2V6a2 2 0 0 0-2-2zm0 14H5V8h14z',
    tensorboard: 'M3 20h18v-2H3zM5 16h3V9H5zm5 0h3V4h-3zm5 0h3v-5h-3z',
    vscode: 'M9.4 16.6 4.8 12l4.6-4.6L8 6l-6 6 6 6zm5.2 0 4.6-4.6-4.6-4.6L16 6l6 6-6 6z'
  };

  let shared = {};
  /** What all extensions of the session share, shared.js, once it is there. */
  let help;
  const helping = import(new URL('../../carme-session/static/shared.js', document.currentScript.src));
  const say = (...sentence) => help.say(...sentence);
  retryThemes();

  /** Load a theme's stylesheet again where a request of it was lost.
   *
   * JupyterLab itself tries once, shows a dialog and stays without colours.
   */
  function retryThemes() {
    const tries = new WeakMap();
    const lost = event => {
      const link = event.target;
      const count = tries.get(link) || 0;
      if (link.tagName !== 'LINK' || !link.href.includes('/lab/api/themes/') || count >= THEME_TRIES) {
        return;
      }
      event.stopImmediatePropagation();
      tries.set(link, count + 1);
      const url = new URL(link.href);
      url.searchParams.set('again', String(count + 1));
      setTimeout(() => link.setAttribute('href', url.href), THEME_MS * (count + 1));
    };
    document.addEventListener('error', lost, true);
  }

  function open(url) {
    window.open(url, '_blank', 'noopener');
  }

  /** The gallery: a card for each notebook, which copies it to the home and opens it. */
  function gallery(app, examples, icon, { apputils, widgets }) {
    const content = new widgets.Widget({ node: document.createElement('div') });
    content.addClass('carme-examples');
    const list = document.createElement('ul');
    for (const { name, title, description } of examples) {
      const button = document.createElement('button');
      const heading = document.createElement('strong');
      heading.textContent = title;
      button.append(heading, description);
      button.addEventListener('click', () => app.commands.execute('carme:open-example', { name }));
      const item = document.createElement('li');
      item.append(button);
      list.append(item);
    }
    const heading = document.createElement('h1');
    heading.textContent = say('Examples');
    const hint = document.createElement('p');
    hint.textContent = examples.length
      ? say('Each opens as a copy of your own, in the folder examples of your home.')
      : say('This image has no examples. The images torch and tensorflow have some.');
    content.node.append(heading, hint, list);
    const panel = new apputils.MainAreaWidget({ content });
    panel.id = 'carme-examples';
    panel.title.label = say('Examples');
    panel.title.icon = icon;
    panel.title.closable = true;
    return panel;
  }

  function addCommands(app, home, refresh, icon, modules) {
    const { apputils, services } = modules;
    const { commands } = app;
    commands.addCommand('carme:portal', {
      label: say('Portal'),
      caption: say('The page of this session: time, log, use, stop'),
      icon: icon('portal'),
      execute: () => open(help.portalPage())
    });
    commands.addCommand('hub:control-panel', {
      label: say('Hub Control Panel'),
      caption: say('Your sessions, in the portal'),
      execute: () => open('/')
    });
    commands.addCommand('carme:help', {
      label: say('Help'),
      caption: say('The guides of this site'),
      icon: icon('help'),
      execute: () => open(HELP)
    });
    commands.addCommand('carme:app', {
      label: args => args.title || say('App'),
      caption: args => say('Open {title} in another tab', args),
      icon: args => icon(args.name in DRAWINGS ? args.name : 'app'),
      execute: args => open(args.url)
    });
    commands.addCommand('carme:examples', {
      label: say('Examples'),
      caption: say('Notebooks to begin with'),
      icon: icon('examples'),
      execute: async () => {
        await refresh();
        const shown = [...app.shell.widgets('main')].find(widget => widget.id === 'carme-examples');
        const panel = shown || gallery(app, home.examples, icon('examples'), modules);
        if (!shown) {
          app.shell.add(panel, 'main');
        }
        app.shell.activateById(panel.id);
      }
    });
    commands.addCommand('carme:open-example', {
      label: args => args.title || say('Open an Example'),
      caption: args => args.description || say('A notebook to begin with'),
      icon: icon('examples'),
      execute: async ({ name }) => {
        try {
          const { path } = await help.ask(services, 'carme/examples', { method: 'POST', body: JSON.stringify({ name }) });
          await commands.execute('docmanager:open', { path });
        } catch (error) {
          apputils.Notification.error(error.message, { autoClose: false });
        }
      }
    });
  }

  /** A button in each notebook that runs all of it. JupyterLab's own one restarts the kernel, and asks first. */
  function addRunAll(app, { apputils }) {
    app.docRegistry.addWidgetExtension('Notebook', {
      createNew: panel => {
        const button = new apputils.ToolbarButton({
          label: say('Run All'),
          tooltip: say('Run all cells'),
          onClick: () => app.commands.execute('notebook:run-all-cells')
        });
        panel.toolbar.insertBefore('cellType', 'carme-run-all', button);
        return button;
      }
    });
  }

  /** JupyterLab's icons of the drawings, by name; each is made once. */
  function makeIcons({ LabIcon }) {
    const icons = new Map();
    return name => {
      if (!icons.has(name)) {
        const svgstr = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><path class="jp-icon3" fill="#616161" d="${DRAWINGS[name]}"/></svg>`;
        icons.set(name, new LabIcon({ name: `carme:${name}`, svgstr }));
      }
      return icons.get(name);
    };
  }

  /** What the launcher, the palette and the menus have from the beginning. Palette and menus may be missing. */
  function addFixed({ commands, restored }, palette, menu, addTile) {
    const category = say('Session');
    const fixed = ['carme:examples', 'carme:portal', 'carme:help'];
    fixed.forEach((command, place) => addTile({ command, rank: 100 + place }));
    // Beside the apps too: JupyterLab's own tile is further down than a page shows.
    restored.then(() => {
      if (commands.hasCommand(TERMINAL)) {
        addTile({ command: TERMINAL, rank: 50 });
      }
    });
    for (const command of fixed) {
      palette?.addItem({ command, category });
    }
    menu?.fileMenu.addGroup(['carme:extend', 'carme:stop', 'hub:control-panel'].map(command => ({ command })), 100);
    menu?.helpMenu.addGroup([{ command: 'carme:help' }, { command: 'carme:examples' }], 0);
  }

  /** Bring the tiles of apps and examples up to date, one for each; those of examples are one click less than the gallery.
   *
   * @param tiles those that the launcher has, by name; changed here
   */
  function renewTiles({ apps, examples }, tiles, addTile) {
    const now = new Set(apps.map(({ name }) => name));
    for (const [name, tile] of tiles) {
      if (!now.has(name) && !name.startsWith('example ')) {
        tile.dispose();
        tiles.delete(name);
      }
    }
    apps.forEach((args, rank) => {
      if (!tiles.has(args.name)) {
        tiles.set(args.name, addTile({ command: 'carme:app', args, rank }));
      }
    });
    examples.forEach((args, rank) => {
      if (!tiles.has(`example ${args.name}`)) {
        const item = { command: 'carme:open-example', args, category: say('Examples'), rank };
        tiles.set(`example ${args.name}`, addTile(item, EXAMPLES));
      }
    });
  }

  async function activate(app, palette, launcher, menu, modules) {
    const style = document.createElement('style');
    style.textContent = STYLE;
    document.head.append(style);
    const home = { apps: [], examples: [] };
    const tiles = new Map();
    const category = say('Session');
    const addTile = (item, categoryRank = SESSION) => launcher?.add({ category, ...item, categoryRank });
    addCommands(app, home, refresh, makeIcons(modules.ui), modules);
    addRunAll(app, modules);
    addFixed(app, palette, menu, addTile);

    async function refresh() {
      try {
        Object.assign(home, await help.ask(modules.services, 'carme/home'));
      } catch {
        return; // what was known last holds
      }
      if (launcher) {
        renewTiles(home, tiles, addTile);
      }
    }
    await refresh();
    help.poll(refresh, ASK_MS, () => !document.hidden);
  }

  const PARTS = ['apputils', 'launcher', 'mainmenu', 'services', 'ui-components'];
  const PACKAGES = [...PARTS.map(name => `@jupyterlab/${name}`), '@lumino/widgets'];

  function plugin(apputils, launchers, menus, services, ui, widgets) {
    return {
      id: 'carme-home:launcher',
      description: "Tiles of the session in the launcher, and the hub's menu entry, which leads to the portal.",
      autoStart: true,
      optional: [apputils.ICommandPalette, launchers.ILauncher, menus.IMainMenu],
      // Not awaited: the page need not wait for the server.
      activate: (app, palette, launcher, menu) => {
        activate(app, palette, launcher, menu, { apputils, services, ui, widgets });
      }
    };
  }

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB['carme-home'] = {
    init: packages => {
      shared = packages;
    },
    get: async () => {
      help = await helping;
      return help.extension(shared, PACKAGES, plugin);
    }
  };
})();
