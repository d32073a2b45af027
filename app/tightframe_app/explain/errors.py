"""Meaning of every error code: what it means, what to do, and what leaves a site with it.

``tightframe explain TF-612`` prints an entry, and the site of the guides shows them all. A code's meaning
never changes. Links are those of ``docs/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tightframe.errors import REASONS

CODE = "The code."
NOTHING = "Nothing."


@dataclass(frozen=True)
class Entry:
    """What a code means.

    Attributes:
        do: what to do.
        title: in a few words; empty where ``tightframe.errors.REASONS`` has them.
        means: more than the title says; may be empty.
        leaves: what the server learns besides the silo's name.
    """

    do: str
    title: str = ""
    means: str = ""
    leaves: str = CODE


@dataclass(frozen=True)
class Section:
    """Codes of one subject.

    Attributes:
        codes: in order.
        about: what holds for all of them; may be empty.
    """

    title: str
    codes: Mapping[str, Entry]
    about: str = ""


def title(code: str) -> str:
    """Return what a code means in a few words.

    >>> title("TF-502"), title("TF-614")
    ('a silo was late', "below the site's policy")
    """
    return ENTRIES[code].title or REASONS[code]


SECTIONS: tuple[Section, ...] = (
    Section(
        "The job",
        codes={
            "TF-101": Entry(
                title="the job cannot run as it is written",
                means="The listed values are missing, wrong, unknown or not installed.",
                do=(
                    "Correct them (`tightframe jobs check FOLDER`) or export the job again. Install "
                    "extensions at the server and all silos."
                ),
            ),
            "TF-102": Entry(
                title="a job folder would be written over something else",
                means="The output folder holds other files, another job, or changes. Nothing was written.",
                do="Choose another folder, or add `--force`, which moves this one to `FOLDER.before`.",
                leaves=NOTHING,
            ),
            "TF-103": Entry(
                title="a simulation runs in the workspace already",
                do=(
                    "Wait, end the named process, or use another workspace: `tightframe simulate JOB -w "
                    "OTHER`."
                ),
                leaves=NOTHING,
            ),
            "TF-104": Entry(
                means=(
                    "`nvflare simulator` was started in the workspace of a running simulation and wiped it."
                ),
                do=(
                    "Use `tightframe simulate`, which refuses this, or give each run its own `-w`. "
                    "`tightframe jobs check` restores the repository's allow list."
                ),
            ),
            "TF-105": Entry(
                title="a simulation was interrupted",
                means=(
                    "It was stopped, or its processes vanished (out of memory, for instance). Finished "
                    "rounds are kept."
                ),
                do="Go on from the checkpoint (`tightframe jobs export NAME --resume DIR`) or start again.",
                leaves=NOTHING,
            ),
            "TF-106": Entry(
                title="the path has no job",
                do="Correct the path, or write the folder with `tightframe jobs export NAME`.",
                leaves=NOTHING,
            ),
        },
    ),
    Section(
        "The site's configuration",
        codes={
            "TF-201": Entry(
                title="the site is not configured",
                means=(
                    "In production: `local/tightframe.json` is missing, has no `state_dir`, or does not name "
                    "this site or the job's data set. In a simulation: the data set has no synthetic twin."
                ),
                do="Complete the file that the message names.",
            ),
            "TF-202": Entry(
                title="the site's configuration is wrong",
                means=(
                    "`local/tightframe.json` is not JSON, or has unknown keys or wrong values. In production "
                    "also: `local/privacy.json` has no egress guard, or `local/resources.json` streams logs. "
                    "At the server: `server.statsd`, `server.tensorboard` or `server.mlflow` cannot be used."
                ),
                do=(
                    "Correct the listed keys. `tightframe provisioning show local -o FOLDER` writes good "
                    "files for guard and logs."
                ),
            ),
            "TF-211": Entry(
                title="a package that the server's configuration asks for is not installed",
                means=(
                    "`server.tensorboard` needs TensorBoard, `server.statsd` the StatsD client (`datadog`), "
                    "`server.mlflow` `mlflow-skinny`."
                ),
                do="[Install it](monitoring.md) at the server, or remove the key.",
                leaves=NOTHING,
            ),
        },
    ),
    Section(
        "The site's records",
        about="All records are checked at enrolment, before any training.",
        codes={
            "TF-203": Entry(
                title="the data folder is missing",
                means=(
                    "The client's account cannot find or read `root`, or cannot write the folder for "
                    "prepared data."
                ),
                do="Correct `root`, give that account access, or mount the folder in the container.",
            ),
            "TF-204": Entry(
                title="a split file or table is missing, malformed or contradicts itself",
                do="Fetch it again from its publisher. Do not edit it.",
            ),
            "TF-205": Entry(
                title="files are missing",
                do="Finish the download or preprocessing, and check that `center` is right.",
            ),
            "TF-206": Entry(
                title="files cannot be read, are damaged, or do not fit their hashes",
                do=(
                    "Of a table, correct what is named: `encoding`, ending, quotes; save Excel files as CSV. "
                    "Replace or leave out named pictures. Copy or prepare a data set's listed files "
                    "again."
                ),
            ),
            "TF-207": Entry(
                title="a class, outcome or level is unknown",
                do=(
                    "Take the split file of this version of the data set. Leave such records out; do not "
                    "relabel them."
                ),
            ),
            "TF-208": Entry(
                title="a centre or fold is empty",
                means=(
                    "The configured centre, hospital or region has no test record, no training record, or "
                    "only one (a batch may hold half of them at most: `full_batches`)."
                ),
                do="Correct `center` or the split file.",
            ),
            "TF-209": Entry(
                title="the drug vocabulary is not the job's",
                do=(
                    "Name the federation's `vocabulary` in the site's entry, or export the job with the one "
                    "that all sites have."
                ),
            ),
            "TF-210": Entry(
                title="the patients of the records are not known",
                means=(
                    "The job protects patients (`privacy.neighbours: patient`), but the data do not say "
                    "whose each record is."
                ),
                do=(
                    "Add the patients (`patient_FOLD` in an `.npz`, `groups` of your own data set), or use "
                    "`privacy.neighbours: record`."
                ),
            ),
            "TF-212": Entry(
                title="records of another shape than the model takes, or no `float32`",
                do=(
                    "Prepare records of the named shape, or ask the lead for a job with yours "
                    "(`dataset_options`)."
                ),
            ),
            "TF-213": Entry(
                title="a label is no class's number, or records and labels differ in number",
                do="Correct them. Classes count from 0, in the order of `class_names`.",
            ),
            "TF-214": Entry(
                title="withdrawn records that the site does not have",
                means=(
                    "The file that `withdrawn` names cannot be read, is malformed, or names records or "
                    "patients that are not here; or fewer than two training records would remain."
                ),
                do="Correct the file ([its form](jobs.md#taking-records-out-of-a-run)).",
            ),
            "TF-215": Entry(
                title="records break the job's contract",
                means=(
                    "Values of a [table](own-data.md) are missing, not numbers, out of range or no code of "
                    "the contract; or [pictures](own-pictures.md#the-sites-entry) are missing, damaged or of "
                    "another kind. The site's log lists column, rule and row numbers, no values."
                ),
                do=(
                    "See all findings with `tightframe data check`. Correct the rows, map own codes and "
                    'units in the site\'s entry, or have such rows left out (`"invalid": "set_aside"`).'
                ),
            ),
            "TF-216": Entry(
                title="a patient is in two folds",
                do="Correct the fold column; the message has the row numbers.",
            ),
            "TF-217": Entry(
                title="the site's database cannot be asked",
                means=(
                    "The address is missing, the connection or the query fails. The message has the kind of "
                    "error and its SQLSTATE, never the address or the database's own words."
                ),
                do=(
                    "Check that the client has `url_env`, or can read `url_file` and nobody else can. Try "
                    "the query, one `SELECT`, by hand."
                ),
            ),
            "TF-218": Entry(
                title="the site's entry does not fit the job's contract",
                means=(
                    "`columns`, `codes` or `units` name something that the contract does not have, or the "
                    "entry pins another `contract`."
                ),
                do="Correct the entry. Whoever answers for the records decides on a new contract.",
            ),
            "TF-219": Entry(
                title="a package that this kind of table takes is not installed",
                do=(
                    "At this site: `pip install 'tightframe[parquet]'`, `'tightframe[sql]'`, or for volumes "
                    "`'tightframe[nifti]'`."
                ),
            ),
        },
    ),
    Section(
        "Local training",
        codes={
            "TF-301": Entry(
                title="training is not finite",
                means="A loss, feature or parameter became NaN or infinite.",
                do=(
                    "Lower the learning rate or the method's weights; on a GPU try without `training.amp`. "
                    "If it is always the same silo, look for damaged records."
                ),
            ),
            "TF-302": Entry(
                do="Use the batch size that the log suggests, or free the device.",
            ),
            "TF-303": Entry(
                title="PyTorch finds no such device",
                do="Set `device` to `auto` or `cpu`, or install PyTorch for the GPU.",
            ),
            "TF-304": Entry(
                title="the site's own training loop failed",
                means=(
                    "The [installed loop](own-training.md) raised an error, or left something that is not "
                    "finite or of another shape. The silo counts as one that changes nothing; its log has "
                    "the trace."
                ),
                do="Correct the loop at that site.",
                leaves=NOTHING,
            ),
        },
    ),
    Section(
        "The contribution",
        about="The silo checks a contribution *before* it encodes it: with one of these, nothing was sent.",
        codes={
            "TF-401": Entry(
                title="a contribution is not finite",
                do="As for TF-301.",
            ),
            "TF-402": Entry(
                title="a value is over its field's bound",
                do=(
                    "Model: lower the learning rate, set `update_norm` (it rescales and never refuses), or "
                    "raise `update_bound` (not with `privacy`: the log says how much is noise, and what "
                    "lowers it). Features: lower the learning rate or the method's weights. Counts: look at "
                    "the records."
                ),
            ),
            "TF-403": Entry(
                title="a contribution does not fit its schema",
                means="Server and silo run different code or jobs, or a silo answered twice.",
                do=(
                    "Install the same version of Tightframe and extensions everywhere. A method of your own "
                    "must return exactly its phase's tensors."
                ),
                leaves="The code, if the silo notices.",
            ),
            "TF-404": Entry(
                title="a sum could wrap around its ring",
                means=(
                    "With this many silos and these bounds a sum could overflow unnoticed. No task was sent."
                ),
                do=(
                    "Lower the named field's bound (`update_bound`, `update_norm`), or declare it in the "
                    "64-bit ring."
                ),
                leaves=NOTHING,
            ),
        },
    ),
    Section(
        "The run",
        codes={
            "TF-500": Entry(
                title="an error without a code of its own",
                do="Report it with the server's log.",
                leaves=NOTHING,
            ),
            "TF-501": Entry(
                title="too few silos",
                means=(
                    "Fewer than `min_sites` enrolled or contributed, so the run ended. In the closing phase "
                    "the model is trained, but not measured."
                ),
                do=(
                    "Look up the missing silos' codes and logs. Lower `min_sites` only if the study's "
                    "protocol allows it: a sum of fewer silos says more about each."
                ),
                leaves="The codes of the missing silos.",
            ),
            "TF-502": Entry(
                title="a silo was late",
                means=(
                    "It did not answer within `site_timeout` seconds, did not fetch its task within "
                    "`fetch_timeout`, or its process had gone. A later answer is not used."
                ),
                do=(
                    "Nothing, if it happened once. At enrolment: is it connected (`nvflare system status`), "
                    "and is `sites` spelt as provisioned? Otherwise look at network and load, or raise the "
                    "timeout. [If it stays away](operations.md#when-something-fails)."
                ),
                leaves=NOTHING,
            ),
            "TF-503": Entry(
                title="a silo failed with an error of its own",
                means="For instance a broken driver, or a full disk below the kit.",
                do="Look in the silo's log. If Tightframe is the cause, report it without paths and names.",
            ),
            "TF-504": Entry(
                title="the run was aborted",
                means=(
                    "Somebody aborted the job, or a silo's job process died; the server's log says which. "
                    "Finished rounds are kept."
                ),
                do="[Go on with the job](operations.md#go-on-with-a-stopped-job).",
            ),
            "TF-505": Entry(
                title="configurations differ",
                means=(
                    "The server's job or version is not the silo's, it asked for something that the job does "
                    "not plan, or the method takes no `server.initial_model`."
                ),
                do=(
                    "Give every site the same exported folder and version. Remove `server.initial_model` "
                    "where the message says so."
                ),
            ),
            "TF-506": Entry(
                title="synthetic and real records are mixed",
                do=(
                    "Configure the remaining sites' records in `local/tightframe.json`, or export the job "
                    "without those sites. For a rehearsal configure none (or only a `policy`)."
                ),
                leaves="Whether its records are synthetic, as always.",
            ),
            "TF-507": Entry(
                title="a checkpoint is torn",
                do="Copy it again from the server, or start again. Never edit the hash.",
                leaves=NOTHING,
            ),
            "TF-508": Entry(
                title="there is nothing to compare a baseline with",
                do=(
                    "Nothing: the run is not affected. The silo missed round 1 or the closing, or gave no "
                    "shares there."
                ),
            ),
            "TF-509": Entry(
                title="a silo refused to enrol",
                means=(
                    "For another reason than its privacy budget; nothing was trained. Silos that did not "
                    "answer (TF-502), often the cause, are named first."
                ),
                do=(
                    "Look up codes and logs. Correct the cause or, while enough silos remain, export the job "
                    "without those."
                ),
                leaves="The code; with TF-614 what that entry says.",
            ),
            "TF-510": Entry(
                title="statistics could not be opened",
                means=(
                    "Before round 1 silos dropped out twice, or had opened their statistics for another "
                    "cohort; or the class rules left a closed form (`fed3r`, `fedcgs`, `fedncm`, a `start`) "
                    "fewer than two classes; or a silo could not add its sums. With privacy: noise hides all "
                    "classes but one."
                ),
                do=(
                    "Look up the named silos' codes; start again, or export the job without them. Too few "
                    "classes: more silos, a lower `min_class_count`, or another method. Too much noise: more "
                    "epsilon, `spare_rounds: 0` or more records."
                ),
                leaves="The codes of the missing silos.",
            ),
            "TF-511": Entry(
                title="a silo was not in the round's earlier sum",
                means="A round's later sums rest on its earlier ones. The silo is back in the next round.",
                do="Find out why it was left out.",
                leaves=NOTHING,
            ),
            "TF-512": Entry(
                title="a silo could not write to its disk",
                means="The disk is full, over quota or read-only. Nothing was sent.",
                do="Make room for `state_dir` and kit; `tightframe site check` says how much there is.",
            ),
            "TF-513": Entry(
                means=(
                    "Silos failed in a sum, which they say only inside it, and fewer than `min_sites` "
                    "remained. The run ended."
                ),
                do="Look for the reason in the silos' own logs.",
                leaves="The number of failed silos.",
            ),
            "TF-518": Entry(
                title="another state of the run",
                means=(
                    "The server's state does not follow from job and totals, by more than machines round "
                    "differently, or has another frozen encoder. Nothing was trained on it."
                ),
                do=(
                    "Compare versions and pretrained start at server and silo. If they agree, do not trust "
                    "the server."
                ),
            ),
            "TF-519": Entry(
                means=(
                    "A silo missed the last sums before a new session or a resumed job, so that it has "
                    "nothing to check the state by that the server sent. Nothing was trained on it."
                ),
                do="Nothing: it takes part again once the others' first total is opened.",
            ),
            "TF-521": Entry(
                means=(
                    "The checkpoint is missing, another job's or of another version, or a silo's state "
                    "belongs to another job."
                ),
                do=(
                    "Export the job again (`tightframe jobs export --resume` or `--withdraw-from`) with the "
                    "version that wrote the checkpoint, and change nothing."
                ),
            ),
            "TF-522": Entry(
                title="a silo's own state is lost",
                means=(
                    "The state of the last round is missing or torn, the checkpoint is more than a round "
                    "behind, or a simulation got no `--previous-run`. In a withdrawal also: this silo's sums "
                    "of the run are no longer what it gave."
                ),
                do=(
                    "Put `state_dir` back, or use the latest checkpoint, and run the job again. Otherwise "
                    "start again."
                ),
            ),
            "TF-523": Entry(
                means=(
                    "Fewer than `min_withdrawn` records, or of fewer than three silos, are to be taken out, "
                    "or a class loses some at one or two; or a silo is missing, was not in an earlier sum, "
                    "or the total is not that of the silos' terms; or a withdrawal is resumed that took "
                    "nothing out. Nothing was taken out."
                ),
                do="Wait for more withdrawals; look into the logs of silos that failed.",
                leaves=(
                    "How many records of each fold (up to the number needed), at how many silos; if these "
                    "are enough, each class at how many."
                ),
            ),
            "TF-524": Entry(
                means=(
                    "This site has already taken other records out of this or another run of the same data "
                    "set. Two totals that differ by a few records reveal them."
                ),
                do=(
                    "Name the same records as before. To withdraw more, start from the run that this "
                    "withdrawal makes."
                ),
            ),
            "TF-525": Entry(
                title="an exchange out of order",
                means=(
                    "A silo answers only the exchange that comes next in the job's plan. No record was read "
                    "for this one."
                ),
                do=(
                    "Compare versions at server and silo; a job that an earlier version trained to its end "
                    "is not resumed. If they agree, do not trust the server."
                ),
            ),
        },
    ),
    Section(
        "Secure sums",
        about=(
            "The message names a site only if that site is proved to be to blame. It holds no secret, share "
            "or value of a record."
        ),
        codes={
            "TF-600": Entry(
                title="the secure sum refused",
                do="Report it.",
            ),
            "TF-601": Entry(
                means=(
                    "They are not this job's (id, configuration, version, silos), or are below this site's "
                    "policy."
                ),
                do="Give every site the same exported folder, or change the job.",
            ),
            "TF-602": Entry(
                means=(
                    "A silo's certificate is not from the project root, is out of date or has another role, "
                    "or its key is not pinned here."
                ),
                do=(
                    "Ask that silo's IT, not through the server, for dates and key hash. After a renewal add "
                    "the new pin. Otherwise treat it as impersonation."
                ),
            ),
            "TF-603": Entry(
                do=(
                    "After an update, compare versions. Otherwise somebody alters messages: investigate the "
                    "server."
                ),
            ),
            "TF-604": Entry(
                means="A message, ledger entry or old journal is not in this version's form.",
                do="Compare versions. Restore a ledger or journal from a backup; never edit it.",
            ),
            "TF-605": Entry(
                do="Investigate the server, which departs from the protocol.",
            ),
            "TF-606": Entry(
                do=(
                    "Investigate the named silo and the server: such a key would make shared secrets "
                    "predictable."
                ),
            ),
            "TF-607": Entry(
                means=(
                    "A box of shares cannot be opened, or a share does not have the hash that its dealer "
                    "signed."
                ),
                do="If it is always the same dealer, check its installation.",
            ),
            "TF-608": Entry(
                means=(
                    "An epoch, slot or sum was asked for twice; or a resumed job starts from another state "
                    "than its round's, goes back too far, or is the fifth from one state; or silos were "
                    "enrolled again and again without a term."
                ),
                do=(
                    "After a crash in a task nothing: the silo is back in the next sum. Resume from the "
                    "latest checkpoint of the chain's latest job, or start again. Otherwise somebody replays "
                    "messages."
                ),
            ),
            "TF-609": Entry(
                means=(
                    "A message came out of place, or the process that held the session's secrets has ended."
                ),
                do="Start the job again if a silo's process was restarted during it.",
            ),
            "TF-610": Entry(
                means=(
                    "The receipts of a sum do not agree on state, total, slot and sum, or differ from "
                    "earlier ones. Nothing is revealed."
                ),
                do="As for TF-605.",
            ),
            "TF-611": Entry(
                means=(
                    "The silos for which shares are requested are too few, not those of before, or do not "
                    "include this one, or too few signed for them."
                ),
                do="Nothing, if silos were lost at that moment. Otherwise investigate the server.",
            ),
            "TF-612": Entry(
                means=(
                    "Counts, class sums and evaluation of these records were summed with other silos. The "
                    "difference tells exactly what the silos in only one of the two cohorts have."
                ),
                do=(
                    "Run the job with the same silos, or [accept the "
                    "cohort](site-guide.md#a-hospital-joins-or-leaves)."
                ),
            ),
            "TF-613": Entry(
                means=(
                    "Too few silos gave shares, or the named silo dealt something else than [it committed to "
                    "or signed](secure-sum.md#keys-and-what-a-drop-out-opens). Nothing was opened."
                ),
                do="Look up the codes of silos without a share. A larger roster tolerates more losses.",
                leaves=NOTHING,
            ),
            "TF-614": Entry(
                means=(
                    "The job asks for less than the site's `policy`; the site's log lists the rules. Or "
                    "another silo opens counts for any cohort and this one does not."
                ),
                do=(
                    "Export a job that meets the policy, which is the hospital's decision; agree on one "
                    "`static_cohort`."
                ),
                leaves=(
                    "The code and, unless the policy's `tell_refusals` is false, each rule with asked and "
                    "required value (`not_enrolled_rules` in `outcome.json`)."
                ),
            ),
            "TF-615": Entry(
                means=(
                    "Certificate, key or root in the kit is missing, out of date, readable by others, or "
                    "does not belong to the rest; or production got a simulated identity."
                ),
                do=(
                    "`chmod 600` the key, or have the kit renewed. If the message names dates, check this "
                    "machine's clock first."
                ),
            ),
            "TF-616": Entry(
                title="a transcript is not valid",
                means=(
                    "`tightframe transcript verify` found a forbidden line, a wrong signature or a broken "
                    "chain; `tightframe jobs fetch` also one without a session, which no hospital has signed."
                ),
                do=(
                    "Compare with other sites' transcripts of the run. A changed one proves nothing from the "
                    "line before the change on."
                ),
                leaves=NOTHING,
            ),
            "TF-617": Entry(
                means=(
                    "Without `privacy`, a few totals whose terms were formed in different ways tell [one "
                    "silo's own term](secure-sum.md#one-way-of-forming-sums)."
                ),
                do=(
                    "Export the job with the earlier settings, or let whoever answers for the records "
                    "[accept it](site-guide.md#a-job-forms-its-sums-in-another-way)."
                ),
            ),
            "TF-618": Entry(
                title="the site's processes are another account's",
                do="Run `tightframe site stop` as that account (`sudo -u ACCOUNT ...`).",
                leaves=NOTHING,
            ),
            "TF-619": Entry(
                title="the kit is a person's or the server's",
                do="Give the site's own kit, on its machine. `tightframe site stop` takes the server's, too.",
                leaves=NOTHING,
            ),
            "TF-620": Entry(
                means=(
                    "The ledger, or earlier sums in it, is gone. A new one would allow again what the old "
                    "one forbade."
                ),
                do=(
                    "Restore the newest backup of `state_dir`. Without one, whoever answers for the records "
                    "[decides](site-guide.md#the-state-folder-is-lost)."
                ),
            ),
            "TF-621": Entry(
                means=(
                    "`secure_sum/SITE/journal.jsonl` is not what the ledger took over: it may be older, or "
                    "forged."
                ),
                do="Find out where it came from; move it away.",
            ),
            "TF-622": Entry(
                means=(
                    "The server's request rests on a total that it withheld, replayed or never opened, or "
                    "that is not the one this silo gave shares for."
                ),
                do=(
                    "Investigate the server. If it was restored from a backup during the run, resume the job "
                    "from its checkpoint."
                ),
            ),
            "TF-623": Entry(
                means=(
                    "The combinations of the silos' terms do not add up to those of the total, one silo's "
                    "part is missing, or a dropped silo's seed does not fit. Nothing computed from this "
                    "total is opened."
                ),
                do=(
                    "Investigate the server. If its log names a silo (*to blame*), check that silo's "
                    "installation."
                ),
            ),
            "TF-624": Entry(
                means=(
                    "Of the silos in this sum, no more than may collude (`colluders`) say in their receipts "
                    "that they computed its state."
                ),
                do=(
                    "Find out why silos lost their place in the run (a restarted process only takes the "
                    "state over). Resume the job."
                ),
            ),
            "TF-631": Entry(
                means=(
                    "A silo declares a weight that no number of records gives under the job's `weights`, or "
                    "more than `max_records`."
                ),
                do=(
                    "Run without that silo until it runs the released package. If it really has so many "
                    "records, each refusing site raises `max_records`."
                ),
            ),
            "TF-632": Entry(
                means=(
                    "The model has over 100 million numbers (`max_parameters`), or a sum is over 1 GiB "
                    "(`max_message_bytes`). A stricter policy says TF-614."
                ),
                do="Make the model smaller (`model_options`, `method_options`).",
                leaves=NOTHING,
            ),
        },
    ),
    Section(
        "The job's signature",
        about=(
            "TF-633 to TF-637 stand in the log of the site's engine, beside TF-733, or of its training "
            "service. `nvflare job meta JOB_ID` shows a refusal to deploy too."
        ),
        codes={
            "TF-633": Entry(
                do=(
                    "The lead signs it with `tightframe jobs sign FOLDER` and submits it again. (The site's "
                    "`signed_jobs` asks for it.)"
                ),
            ),
            "TF-634": Entry(
                means=(
                    "The manifest is malformed, or not signed by a `lead` (or `project_admin`) under this "
                    "project's root; or `jobs sign` was asked for less than a day or more than a year."
                ),
                do=(
                    "Sign the folder again with the lead's own kit. If nobody in the project changed it, "
                    "somebody else did."
                ),
            ),
            "TF-635": Entry(
                means="Files or values differ, or it was signed for other sites.",
                do="As for TF-634.",
            ),
            "TF-636": Entry(
                do="Check this machine's clock; then sign (`--days`) and submit again.",
            ),
            "TF-637": Entry(
                means=(
                    "The job was submitted or cloned again, or the site's record of signatures "
                    "(`signed_jobs/` in `state_dir`) cannot be read."
                ),
                do="Sign the job again. Restore an unreadable record from a backup.",
            ),
        },
    ),
    Section(
        "Differential privacy",
        about=(
            "If one of these stops a silo, nothing was released without being charged; what was charged "
            "stays charged ([why](privacy-engineering.md#the-ledger))."
        ),
        codes={
            "TF-700": Entry(
                means=(
                    "A value is out of range, an event is unknown, the grid is too coarse for the noise, or "
                    "training records are repeated."
                ),
                do=(
                    "Correct the named value; remove `oversample_minority`. Read a ledger with the version "
                    "that wrote it."
                ),
            ),
            "TF-701": Entry(
                means=(
                    "The job does not fit into the site's `epsilon_cap`, its own epsilon (a round was "
                    "repeated) or `max_releases`, or no noise is enough. Nothing was charged; the other "
                    "silos go on."
                ),
                do=(
                    "Plan fewer rounds or releases, or a smaller `privacy.epsilon`. The message says what "
                    "would fit, `tightframe ledger explain` what was spent. The cap is the hospital's "
                    "decision."
                ),
                leaves="The code, not the budget.",
            ),
            "TF-702": Entry(
                means=(
                    "Ledger or head are not what was written, belong to another site, or are an older copy; "
                    "or entries are signed under another root."
                ),
                do=(
                    "Keep the file as evidence, and restore the newest backup of ledger and head file "
                    "together; without one as for TF-620. If only the head file was lost, find out why, then "
                    "run `tightframe ledger verify --renew-head`. If the other root is your own, name it in "
                    "[`ledger_roots`](site-guide.md#a-new-root-or-a-second-project)."
                ),
            ),
            "TF-703": Entry(
                means=(
                    "The ledger knows these records under another `dataset_id` (or, without one, in another "
                    "folder)."
                ),
                do="Set `dataset_id` to the name in the message.",
            ),
            "TF-704": Entry(
                means="It is missing, damaged, of another version, locked, or cannot be written.",
                do=(
                    "Make room; keep `state_dir` on a local disk of the client's account. Restore a lost or "
                    "damaged file from a backup: a new one forgets what was spent."
                ),
            ),
            "TF-705": Entry(
                means=(
                    "Another process made this charge, or the job repeats rounds more often than "
                    "`charged_retries` allows."
                ),
                do=(
                    "Find out why rounds fail; the outcome has the codes. If nothing explains it, a server "
                    "may be draining the budget: do not raise `charged_retries`. Run one client process for "
                    "each site."
                ),
            ),
            "TF-706": Entry(
                means=(
                    "Earlier charges on these records protect records and the new one patients, or the "
                    "reverse."
                ),
                do="Set `privacy.neighbours` to the ledger's; the site's `policy.neighbours` fixes it.",
            ),
            "TF-711": Entry(
                means=(
                    "Through the named term, layer or correction one record's gradient depends on others, so "
                    "clipping bounds nothing. Nothing was charged."
                ),
                do=(
                    "Use the method's form for differential privacy, or weight 0. In your own method a term "
                    "must be a mean over records of what depends on one record and constants."
                ),
            ),
            "TF-712": Entry(
                means=(
                    "Records meet in layers that cannot be replaced: recurrent or attention layers, or "
                    "normalisation with running statistics."
                ),
                do="Choose another `model`, or `privacy.normalisation: group`.",
            ),
            "TF-720": Entry(
                title="the operating system gave too few random numbers",
                do="Give the container `getrandom` or `/dev/urandom`.",
            ),
            "TF-721": Entry(
                title="a record adds more to a class sum than its bound",
                do="Report it. In a method of your own, clip with `clip_features` first.",
            ),
        },
    ),
    Section(
        "The egress guard",
        codes={
            "TF-730": Entry(
                means=(
                    "This silo was about to send something that is no answer of the protocol, or an event to "
                    "other sites. The run goes on."
                ),
                do=(
                    "If it is only too large, raise `max_bytes` in `local/privacy.json`. If nobody here "
                    "changed job, filter or package, treat it as an attempt to take data out: keep log and "
                    "job folder, and check what `local/` allows."
                ),
            ),
        },
    ),
    Section(
        "The engine's doors",
        about="What each process accepts from whom: [threat-model.md](threat-model.md#the-engines-doors).",
        codes={
            "TF-731": Entry(
                means=(
                    "Without `tightframe.flare.doors` anybody with a startup kit can read files, delete "
                    "folders and stop the engine, so no production job runs."
                ),
                do=(
                    'Add the message\'s line to `"components"` in `local/resources.json` and restart the '
                    "engine, or run `tightframe federation add-site NAME --kit KIT --force` with the first "
                    "time's options. If somebody with a kit may be dishonest, assume that key and records "
                    "were read, and [renew the certificate](site-guide.md#renew-the-certificate)."
                ),
            ),
            "TF-732": Entry(
                means=(
                    "It is not NVFlare 2.9.0 and may have commands that the doors do not know; production "
                    "does not run."
                ),
                do="Install the version in `constraints.txt`.",
            ),
            "TF-733": Entry(
                title="the doors refused a message",
                means=(
                    "This process does not accept the named message from that origin and neighbour. Few "
                    "repeats are logged."
                ),
                do=(
                    "Nothing for `sys.report_resources` (the lead's console) and `train.check_status` "
                    "(`nvflare system status`). For `admin:train.deploy` with a code see "
                    "TF-633 to TF-637. Shell commands, `_net_manager`, or an origin that is "
                    "not the neighbour are an attempt, or a changed program: keep the log and ask who owns "
                    "that neighbour."
                ),
                leaves="That it was refused.",
            ),
        },
    ),
    Section(
        "Two accounts at a site",
        about="How to set them up: [site-guide.md](site-guide.md#two-accounts).",
        codes={
            "TF-741": Entry(
                title="the training service is not there, or is another's",
                means=(
                    "Nothing answers at its socket, or service, engine or socket folder belong to other "
                    "accounts than configured. The job is not started."
                ),
                do=(
                    "`systemctl status tightframe-training`, and read its log. Correct `account` and "
                    "`socket_path` in the engine's `local/resources.json`, `engine_account` in the training "
                    "account's `local/tightframe.json`."
                ),
                leaves="That the job could not be started here.",
            ),
            "TF-742": Entry(
                title="the two accounts are not apart",
                means=(
                    "`engine_account` can read or change what belongs to the training account alone, is the "
                    "training account, or does not exist. Nothing is trained."
                ),
                do=(
                    "`chown` what is listed to the training account and `chmod go=` it; programs belong in a "
                    "folder of root's. `tightframe site check --production` gives the list beforehand."
                ),
            ),
            "TF-743": Entry(
                title="the training service refused a request",
                means=(
                    "The request is not the launcher's, has other files than a job's configuration, is not "
                    "signed by a role that may submit jobs, or ran here before; or too many jobs are "
                    "running."
                ),
                do=(
                    "Submit the job again. If nobody did anything unusual, somebody may have the engine's "
                    "account: see who was logged in, and renew its key."
                ),
                leaves="That the job could not be started here.",
            ),
            "TF-744": Entry(
                title="another account asked the training service",
                do="It got no answer. Find out whose it is: `getent passwd NUMBER`.",
                leaves=NOTHING,
            ),
            "TF-745": Entry(
                title="one key for both accounts",
                do=(
                    "Request a second certificate for the training account, with a key of its own, and give "
                    "peers its pin."
                ),
                leaves="That the job could not be started here.",
            ),
        },
    ),
    Section(
        "Joining and leaving",
        about="Errors of `tightframe site join`, `start`, `leave` and `tightframe federation certify`.",
        codes={
            "TF-751": Entry(
                title="not a file to join with",
                do=(
                    "Give the lead's `NAME.yml`, then the keeper's `NAME.signed.zip`; to `certify`, one "
                    "`NAME.request.zip` of each participant."
                ),
                leaves=NOTHING,
            ),
            "TF-752": Entry(
                title="the engine's provisioning refused",
                do="Follow the engine's own words in the message.",
                leaves=NOTHING,
            ),
            "TF-753": Entry(
                title="another root than the keeper's",
                do=(
                    "Nothing was made. Compare with what you heard by telephone. If you typed it correctly, "
                    "call the keeper: somebody has put another root in between."
                ),
                leaves=NOTHING,
            ),
            "TF-754": Entry(
                title="no request that the answer belongs to",
                do=(
                    "Join in the folder and on the machine where you asked last, or name the request's "
                    "folder with `--output`."
                ),
                leaves=NOTHING,
            ),
            "TF-755": Entry(
                title="asked for already",
                do="Go on with the key or kit that exists, leave first, or use another folder.",
                leaves=NOTHING,
            ),
            "TF-756": Entry(
                title="a site that runs cannot leave",
                do="Stop it: `tightframe site stop --kit KIT`.",
                leaves=NOTHING,
            ),
            "TF-757": Entry(
                title="the kit is not ready to start",
                do=(
                    "Its `local/` does not shut the engine's doors: fill it (`tightframe site join "
                    "NAME.signed.zip`, or `tightframe federation add-site`). Or its start cannot be noted in "
                    "kit and state folder: start it by the account that owns them."
                ),
                leaves=NOTHING,
            ),
            "TF-758": Entry(
                title="the kit runs already",
                means=(
                    "A process runs this kit, or a copy of it with the same state folder. The server would "
                    "lose one of two clients of one name, and its job; two servers would write the same "
                    "state."
                ),
                do="Stop the one that is named: `tightframe site stop --kit KIT`.",
                leaves=NOTHING,
            ),
            "TF-759": Entry(
                title="the site does not reach its server",
                means="The line says why; the engine goes on trying, and it comes again every ten minutes.",
                do=(
                    "No answer: see that the server runs, and that this machine may reach its name and port. "
                    "Another federation: take the kit of the right one, or correct where the name leads."
                ),
                leaves=NOTHING,
            ),
        },
    ),
    Section(
        "Watching a run",
        about="Errors of `tightframe watch`; the job does not notice them.",
        codes={
            "TF-811": Entry(
                title="no startup kit of a person",
                do=(
                    "Give a kit of a person (lead, admin or member) with `--kit`, or name it once: `nvflare "
                    "config add NAME KIT`, `nvflare config use NAME`."
                ),
                leaves=NOTHING,
            ),
            "TF-812": Entry(
                title="the server cannot be reached",
                do=(
                    "Check that the server runs and answers (`--patience`), and that the kit is this "
                    "federation's and in date. The job may go on; watch it again."
                ),
                leaves=NOTHING,
            ),
            "TF-813": Entry(
                title="no such job",
                do="`nvflare job list` shows the jobs. With several federations check `--kit`.",
                leaves=NOTHING,
            ),
            "TF-814": Entry(
                title="not allowed to look",
                do=(
                    "Ask the server's operator for the right `view`: `tightframe federation add-site` writes "
                    "the usual rights."
                ),
                leaves=NOTHING,
            ),
            "TF-815": Entry(
                title="a status that cannot be read",
                do=(
                    "Use the server's version of Tightframe. `nvflare job stats JOB` shows the raw values. "
                    "If an id of a job was no UUID, tell the federation: an honest server gives none."
                ),
                leaves=NOTHING,
            ),
            "TF-816": Entry(
                title="the page cannot be served",
                do=(
                    "Another program has the port. Choose another `--port`, or leave it out: a free one is "
                    "taken."
                ),
                leaves=NOTHING,
            ),
            "TF-817": Entry(
                title="a result with paths outside of its folder",
                means=(
                    "The server that a result was fetched from named a file elsewhere, which the engine "
                    "would have written. Nothing was."
                ),
                do="Tell the federation: this server attacks whoever fetches results.",
                leaves=NOTHING,
            ),
        },
    ),
    Section(
        "The report",
        codes={
            "TF-801": Entry(
                title="there are no results to report",
                do=(
                    "Name a folder that the message lists: with one server's `outcome.json` or one silo's "
                    "`local_report.json`."
                ),
                leaves=NOTHING,
            ),
            "TF-802": Entry(
                title="a file of results cannot be read",
                means="The named file is malformed, too large, or of a later version.",
                do=(
                    "Use the named version or a later one, or copy the file again from the run. `tightframe "
                    "transcript verify` says whether a transcript was changed."
                ),
                leaves=NOTHING,
            ),
            "TF-803": Entry(
                title="the report cannot be written",
                do=(
                    "Check permissions and disk, or choose another place with `tightframe report DIR --out "
                    "FILE`."
                ),
                leaves=NOTHING,
            ),
            "TF-804": Entry(
                title="the results do not have what was asked of them",
                means=(
                    "The class of a prevalence is unknown; or runs to be compared have different data sets, "
                    "classes or test records, one is a silo's own, or one is named twice."
                ),
                do=(
                    "Name a class that the message lists; compare runs of the same data, by their servers' "
                    "results."
                ),
                leaves=NOTHING,
            ),
        },
    ),
    Section(
        "Using a model",
        about="Errors of `tightframe predict`, `tightframe export` and `tightframe.load_model`.",
        codes={
            "TF-821": Entry(
                title="there is no model to load",
                do=(
                    "Name a folder with `model.safetensors` and `model.json` (a server's) or "
                    "`local_report.json` (a silo's) of a run that trained to its end."
                ),
                leaves=NOTHING,
            ),
            "TF-822": Entry(
                title="the model is not the one that its card describes",
                do="Copy the run's whole folder again; use the version of Tightframe that the card names.",
                leaves=NOTHING,
            ),
            "TF-823": Entry(
                title="the input has another form than the model takes",
                do=(
                    "Correct what the message lists (path, kind of file, columns, shape, options). Nothing "
                    "was computed."
                ),
                leaves=NOTHING,
            ),
            "TF-824": Entry(
                title="a record cannot be judged",
                do="Convert or correct it, and predict it alone. The others are judged.",
                leaves=NOTHING,
            ),
            "TF-825": Entry(
                title="the model cannot be exported in this form",
                means=(
                    "A package of the extra `export` is missing, the named part of the network has "
                    "operations that the form does not, or the exported bundle does not run."
                ),
                do="Install it, choose another format, or use `tightframe.load_model`.",
                leaves=NOTHING,
            ),
            "TF-826": Entry(
                title="an export differs from the model",
                do=(
                    "Nothing was written. Choose another format, or a larger `--tolerance` if the printed "
                    "difference does no harm."
                ),
                leaves=NOTHING,
            ),
            "TF-827": Entry(
                title="a silo's final model was never proven",
                means=(
                    "The run ended before this silo gave its shares of a sum that verifies the last total: "
                    "the server told it a false one, or could open no other sum. What the silo made of that "
                    "total lies in the folder `unproven`."
                ),
                do=(
                    "Compare `model_sha256` in that folder's report with other silos': if it is the same, "
                    "move all files but `needs.json` one folder up, and delete `unproven`."
                ),
                leaves=NOTHING,
            ),
        },
    ),
)

ENTRIES: Mapping[str, Entry] = {code: entry for section in SECTIONS for code, entry in section.codes.items()}
