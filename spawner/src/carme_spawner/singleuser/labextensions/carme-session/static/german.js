/* The sentences of the session's extensions in German, by the English ones; shared.js loads it where it is needed. */
export const sentences = {
  'A notebook to begin with': 'Ein Notebook für den Anfang',
  'All documents are saved first. What is only in the memory of kernels and terminals is lost.':
    'Alle Dokumente werden zuerst gespeichert. Was nur im Speicher von Kerneln und Terminals ist, geht verloren.',
  'All documents are saved.': 'Alle Dokumente sind gespeichert.',
  App: 'App',
  'Ask for more time': 'Mehr Zeit anfordern',
  'Copy what you need before you leave this page.': 'Kopieren Sie, was Sie brauchen, bevor Sie diese Seite verlassen.',
  'Documents are being saved.': 'Dokumente werden gespeichert.',
  'Each opens as a copy of your own, in the folder examples of your home.':
    'Jedes öffnet sich als Ihre eigene Kopie, im Ordner examples Ihres Heimatverzeichnisses.',
  Examples: 'Beispiele',
  Extend: 'Verlängern',
  'Extend This Session…': 'Diese Sitzung verlängern…',
  'Go to the Portal': 'Zum Portal',
  Help: 'Hilfe',
  'Hub Control Panel': 'Hub-Kontrollzentrum',
  'It ends at {time}, in {left}.': 'Sie endet um {time}, in {left}.',
  'It has no end yet.': 'Sie hat noch kein Ende.',
  'Loading what this session uses.': 'Die Nutzung dieser Sitzung wird geladen.',
  'More time for this session, in minutes': 'Mehr Zeit für diese Sitzung, in Minuten',
  'No answer from this session': 'Diese Sitzung antwortet nicht',
  'Not saved: {names}.': 'Nicht gespeichert: {names}.',
  'Notebooks to begin with': 'Notebooks für den Anfang',
  'Nothing runs in this session. It stops in {left}, at {time}. To go on, run something.':
    'In dieser Sitzung läuft nichts. Sie endet in {left}, um {time}. Führen Sie etwas aus, damit sie weiterläuft.',
  'Open an Example': 'Ein Beispiel öffnen',
  'Open {title} in another tab': '{title} in einem anderen Tab öffnen',
  Portal: 'Portal',
  'Press to start it again, or to go to the portal.': 'Hier starten Sie sie erneut, oder gehen zum Portal.',
  'Report of job {job}': 'Bericht von Job {job}',
  'Run All': 'Alles ausführen',
  'Run all cells': 'Alle Zellen ausführen',
  'Save all documents, and end the session and its kernels':
    'Alle Dokumente speichern, und die Sitzung und ihre Kernel beenden',
  Session: 'Sitzung',
  'Show What This Session Uses': 'Nutzung dieser Sitzung anzeigen',
  'Start Again': 'Erneut starten',
  'Starting again': 'Startet erneut',
  'Stay Here': 'Hier bleiben',
  Stop: 'Beenden',
  'Stop This Session…': 'Diese Sitzung beenden…',
  'Stop this session?': 'Diese Sitzung beenden?',
  'The guides of this site': 'Die Anleitungen dieses Systems',
  'The new session has to wait until this one has ended on its nodes. Try again in a minute.':
    'Die neue Sitzung muss warten, bis diese auf ihren Knoten beendet ist. Versuchen Sie es in einer Minute erneut.',
  'The page of this session: time, log, use, stop': 'Die Seite dieser Sitzung: Zeit, Log, Nutzung, Beenden',
  'The portal could not stop this session. Try again in a minute.':
    'Das Portal konnte diese Sitzung nicht beenden. Versuchen Sie es in einer Minute erneut.',
  'The portal does not answer just now.': 'Das Portal antwortet gerade nicht.',
  'The portal does not answer, or does not know who you are any more. Sign in there again.':
    'Das Portal antwortet nicht, oder es weiß nicht mehr, wer Sie sind. Melden Sie sich dort erneut an.',
  'The portal does not know who you are any more. Sign in there again, in another tab.':
    'Das Portal weiß nicht mehr, wer Sie sind. Melden Sie sich dort in einem anderen Tab erneut an.',
  'The same image, hardware, time and data': 'Gleiches Image, gleiche Hardware, Zeit und Daten',
  'The session did not answer. Try again in a minute.':
    'Die Sitzung hat nicht geantwortet. Versuchen Sie es in einer Minute erneut.',
  'The session goes on. Save or close them, then stop it.':
    'Die Sitzung läuft weiter. Speichern oder schließen Sie sie, und beenden Sie dann die Sitzung.',
  "The session's page on the portal says why.": 'Den Grund nennt die Seite der Sitzung im Portal.',
  'There is no job {job} of yours.': 'Sie haben keinen Job {job}.',
  'This image has no examples. The images torch and tensorflow have some.':
    'Dieses Image hat keine Beispiele. Die Images torch und tensorflow haben welche.',
  'This output names no job.': 'Diese Ausgabe nennt keinen Job.',
  'This server runs outside of a job.': 'Dieser Server läuft außerhalb eines Jobs.',
  'This session': 'Diese Sitzung',
  'This session does not answer just now. This page tries again until it does.':
    'Diese Sitzung antwortet gerade nicht. Diese Seite versucht es erneut, bis sie antwortet.',
  'This session ends in {left}, at {time}.': 'Diese Sitzung endet in {left}, um {time}.',
  'This session has ended': 'Diese Sitzung ist beendet',
  'This session is ending.': 'Diese Sitzung wird beendet.',
  'This session now ends at {time}.': 'Diese Sitzung endet jetzt um {time}.',
  Use: 'Nutzung',
  'What this session uses, and advice': 'Nutzung dieser Sitzung, und Rat',
  'When this session ends. Press for more time, or to stop it.':
    'Wann diese Sitzung endet. Hier verlängern oder beenden Sie sie.',
  'You are still on the page of the old session.': 'Sie sind noch auf der Seite der alten Sitzung.',
  'Your sessions, in the portal': 'Ihre Sitzungen, im Portal',
  '{left} in this session, which ends at {time}': '{left} in dieser Sitzung, die um {time} endet',
  '{left} left': 'noch {left}'
};
