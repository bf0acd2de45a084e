BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0006');
CREATE TABLE attempts (
	run TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	state TEXT NOT NULL, 
	cause TEXT, 
	evidence TEXT NOT NULL, 
	exit_code INTEGER, 
	created_at DOUBLE NOT NULL, 
	started_at DOUBLE, 
	ended_at DOUBLE, 
	engine TEXT NOT NULL, 
	handle TEXT NOT NULL, 
	placement TEXT NOT NULL, 
	order_seq INTEGER NOT NULL, 
	resumed_from TEXT, 
	usage TEXT NOT NULL, 
	removed BOOLEAN NOT NULL, 
	CONSTRAINT pk_attempts PRIMARY KEY (run, number), 
	CONSTRAINT fk_attempts_run FOREIGN KEY(run) REFERENCES runs (id)
);
INSERT INTO "attempts" VALUES('digits-7f3k',1,1,'ended','completed','{}',0,102.0,103.0,110.0,'local','{"dir":"x"}','{"worker-0":{"node":"local"}}',0,NULL,'{}',1);
CREATE TABLE checkpoint_parts (
	run TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	task TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	digest TEXT NOT NULL, 
	size BIGINT NOT NULL, 
	how TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	written_at DOUBLE NOT NULL, 
	step BIGINT, 
	metrics TEXT NOT NULL, 
	checkpoint TEXT, 
	CONSTRAINT pk_checkpoint_parts PRIMARY KEY (run, attempt, generation, task, number), 
	CONSTRAINT fk_checkpoint_parts_run FOREIGN KEY(run) REFERENCES runs (id)
);
INSERT INTO "checkpoint_parts" VALUES('digits-7f3k',1,1,'worker-1',3,'step-100','part1',512,'quiet',105.0,104.0,100,'{"loss":0.5}','c1');
CREATE TABLE checkpoint_transfers (
	run TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	task TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	"offset" BIGINT NOT NULL, 
	length BIGINT NOT NULL, 
	name TEXT NOT NULL, 
	size BIGINT NOT NULL, 
	how TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	written_at DOUBLE NOT NULL, 
	step BIGINT, 
	metrics TEXT NOT NULL, 
	CONSTRAINT pk_checkpoint_transfers PRIMARY KEY (run, attempt, generation, task, number), 
	CONSTRAINT fk_checkpoint_transfers_run FOREIGN KEY(run) REFERENCES runs (id)
);
INSERT INTO "checkpoint_transfers" VALUES('digits-7f3k',1,1,'worker-0',7,120,80,'last.pt',2048,'rename',5.0,4.5,3,'{"loss":0.5}');
CREATE TABLE checkpoints (
	seq INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	run TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	digest TEXT NOT NULL, 
	size BIGINT NOT NULL, 
	how TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	written_at DOUBLE NOT NULL, 
	step BIGINT, 
	metrics TEXT NOT NULL, 
	kept BOOLEAN NOT NULL, world_size INTEGER, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (seq), 
	CONSTRAINT uq_checkpoints_id UNIQUE (id), 
	CONSTRAINT fk_checkpoints_run FOREIGN KEY(run) REFERENCES runs (id)
);
INSERT INTO "checkpoints" VALUES(1,'c1','digits-7f3k',1,1,'step-100','tree1',8589934592,'rename',105.0,104.0,100,'{"loss":0.5}',1,2);
CREATE TABLE clusters (
	name TEXT NOT NULL, 
	config TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	updated_at DOUBLE NOT NULL, 
	CONSTRAINT pk_clusters PRIMARY KEY (name)
);
INSERT INTO "clusters" VALUES('gpu-prod','{"context":"prod"}',120.0,120.0);
CREATE TABLE cursors (
	run TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	task TEXT NOT NULL, 
	file TEXT NOT NULL, 
	"offset" BIGINT NOT NULL, 
	CONSTRAINT pk_cursors PRIMARY KEY (run, attempt, task, file), 
	CONSTRAINT fk_cursors_run FOREIGN KEY(run) REFERENCES runs (id)
);
INSERT INTO "cursors" VALUES('digits-7f3k',1,'worker-0','metrics/1.jsonl',42);
CREATE TABLE events (
	seq INTEGER NOT NULL, 
	run TEXT NOT NULL, 
	t DOUBLE NOT NULL, 
	kind TEXT NOT NULL, 
	text TEXT NOT NULL, 
	data TEXT NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (seq), 
	CONSTRAINT fk_events_run FOREIGN KEY(run) REFERENCES runs (id)
);
INSERT INTO "events" VALUES(1,'digits-7f3k',100.5,'queued','queued','{"user":"ada"}');
INSERT INTO "events" VALUES(2,'digits-9x2m',101.5,'queued','queued','{}');
INSERT INTO "events" VALUES(3,'digits-7f3k',110.0,'ended','ended: completed','{"exit_code":0}');
CREATE TABLE leadership (
	id INTEGER NOT NULL, 
	epoch BIGINT NOT NULL, 
	holder TEXT NOT NULL, 
	url TEXT NOT NULL, 
	turn BIGINT NOT NULL, 
	writer TEXT NOT NULL, 
	beat BIGINT NOT NULL, 
	CONSTRAINT pk_leadership PRIMARY KEY (id)
);
INSERT INTO "leadership" VALUES(1,0,'','',0,'',0);
CREATE TABLE metric_keys (
	id INTEGER NOT NULL, 
	run TEXT NOT NULL, 
	"key" TEXT NOT NULL, 
	CONSTRAINT pk_metric_keys PRIMARY KEY (id), 
	CONSTRAINT uq_metric_keys_run_key UNIQUE (run, "key"), 
	CONSTRAINT fk_metric_keys_run FOREIGN KEY(run) REFERENCES runs (id)
);
INSERT INTO "metric_keys" VALUES(1,'digits-7f3k','loss');
CREATE TABLE metrics (
	key_id INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	step BIGINT NOT NULL, 
	value DOUBLE, 
	t DOUBLE NOT NULL, 
	CONSTRAINT pk_metrics PRIMARY KEY (key_id, attempt, step), 
	CONSTRAINT fk_metrics_key_id FOREIGN KEY(key_id) REFERENCES metric_keys (id)
);
INSERT INTO "metrics" VALUES(1,1,1,0.5,103.0);
INSERT INTO "metrics" VALUES(1,1,2,NULL,104.0);
INSERT INTO "metrics" VALUES(1,1,3,9e999,105.0);
CREATE TABLE resume_keys (
	"key" TEXT NOT NULL, 
	run TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	CONSTRAINT pk_resume_keys PRIMARY KEY ("key"), 
	CONSTRAINT fk_resume_keys_run FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE run_records (
	run TEXT NOT NULL, 
	record TEXT NOT NULL, 
	CONSTRAINT pk_run_records PRIMARY KEY (run), 
	CONSTRAINT fk_run_records_run FOREIGN KEY(run) REFERENCES runs (id)
);
INSERT INTO "run_records" VALUES('digits-7f3k','{"python":"3.12","git":{"commit":"abc","dirty":false}}');
CREATE TABLE run_tags (
	tag TEXT NOT NULL, 
	run_seq INTEGER NOT NULL, 
	CONSTRAINT pk_run_tags PRIMARY KEY (tag, run_seq), 
	CONSTRAINT fk_run_tags_run_seq FOREIGN KEY(run_seq) REFERENCES runs (seq)
);
INSERT INTO "run_tags" VALUES('baseline',1);
INSERT INTO "run_tags" VALUES('ünï',1);
CREATE TABLE runs (
	seq INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	"key" TEXT NOT NULL, 
	fingerprint TEXT NOT NULL, 
	name TEXT NOT NULL, 
	project TEXT NOT NULL, 
	user TEXT NOT NULL, 
	state TEXT NOT NULL, 
	desired TEXT NOT NULL, 
	priority INTEGER NOT NULL, 
	tags TEXT NOT NULL, 
	job TEXT NOT NULL, 
	command TEXT NOT NULL, 
	code TEXT, 
	created_at DOUBLE NOT NULL, 
	started_at DOUBLE, 
	ended_at DOUBLE, 
	exit_code INTEGER, 
	cause TEXT, 
	reason TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	failures INTEGER NOT NULL, 
	faults INTEGER NOT NULL, 
	not_before DOUBLE NOT NULL, 
	outputs TEXT, 
	output_digest TEXT, 
	warnings TEXT NOT NULL, 
	folder TEXT, 
	folder_digest TEXT, removed_at DOUBLE, 
	CONSTRAINT pk_runs PRIMARY KEY (seq), 
	CONSTRAINT uq_runs_id UNIQUE (id), 
	CONSTRAINT uq_runs_key UNIQUE ("key")
);
INSERT INTO "runs" VALUES(1,'digits-7f3k','first','f1','digits','default','ada','succeeded','run',0,'["baseline","\u00fcn\u00ef"]','{"name":"digits","run":"python train.py","retries":2}','["python","train.py"]','code1',100.5,103.0,110.0,0,'completed','',1,0,0,0.0,'{"files":2,"bytes":10,"digest":"out1"}','out1','["slow disk"]','{"files":3,"bytes":12,"digest":"folder1"}','folder1',NULL);
INSERT INTO "runs" VALUES(2,'digits-9x2m','second','f2','digits','default','','queued','run',0,'[]','{"name":"digits","run":"python train.py","retries":2}','["python","train.py"]',NULL,101.5,NULL,NULL,NULL,NULL,'',0,0,0,0.0,NULL,NULL,'[]',NULL,NULL,NULL);
INSERT INTO "runs" VALUES(3,'digits-0old','gone','f1','digits','default','ada','succeeded','run',0,'[]','{"name":"digits","run":"python train.py","retries":2}','["python","train.py"]','code2',100.5,103.0,110.0,0,'completed','',1,0,0,0.0,NULL,NULL,'[]',NULL,NULL,200.5);
CREATE TABLE tasks (
	run TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	task TEXT NOT NULL, 
	incarnation INTEGER NOT NULL, 
	phase TEXT NOT NULL, 
	exit_code INTEGER, 
	usage TEXT NOT NULL, 
	CONSTRAINT pk_tasks PRIMARY KEY (run, attempt, task), 
	CONSTRAINT fk_tasks_run_attempt FOREIGN KEY(run, attempt) REFERENCES attempts (run, number)
);
INSERT INTO "tasks" VALUES('digits-7f3k',1,'worker-0',1,'ended',0,'{"cpu_seconds":1.5}');
CREATE INDEX ix_runs_name_state_seq ON runs (name, state, seq);
CREATE INDEX ix_runs_state_seq ON runs (state, seq);
CREATE INDEX ix_run_tags_run_seq ON run_tags (run_seq);
CREATE INDEX ix_attempts_removed_state ON attempts (removed, state);
CREATE INDEX ix_checkpoints_run_seq ON checkpoints (run, seq);
CREATE INDEX ix_events_run_seq ON events (run, seq);
CREATE INDEX ix_runs_removed_at ON runs (removed_at);
COMMIT;
