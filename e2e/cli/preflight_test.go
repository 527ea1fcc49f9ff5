package cli_test

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/protocol"
)

// These tests check that a daemon that cannot work says at its start what is wrong and what to do, and changes nothing:
// once the fault is corrected, the same directories and tokens work.

// fileStates are all files below the directories: mode and content. Lock files are left out: they are empty, and
// each start makes them.
func fileStates(t *testing.T, dirs ...string) map[string]string {
	t.Helper()
	seen := map[string]string{}
	for _, dir := range dirs {
		require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.Name() == "lock" {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			sum := ""
			if d.Type().IsRegular() {
				data, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				digest := sha256.Sum256(data)
				sum = hex.EncodeToString(digest[:])
			}
			seen[path] = info.Mode().String() + " " + sum
			return nil
		}))
	}
	return seen
}

// fault is a fault of a machine or a configuration.
type fault struct {
	name string
	// hide are files and directories of the machine that the program does not see.
	hide []string
	// says are words of the message: what is wrong, and what to do.
	says []string
}

func (f fault) requireReported(t *testing.T, e devcluster.Ended, err error) {
	t.Helper()
	require.NoError(t, err)
	t.Log(e.Said)
	require.NotZero(t, e.ExitCode, e.Said)
	require.NotEqual(t, -1, e.ExitCode, "a signal ended it: %s", e.Said)
	require.NotContains(t, e.Said, "panic")
	require.NotContains(t, e.Said, "goroutine ")
	for _, words := range f.says {
		require.Contains(t, e.Said, words)
	}
}

// hubMisconfiguration is a fault of a hub's configuration.
type hubMisconfiguration struct {
	fault
	change func(t *testing.T, c *devcluster.HubConfig)
}

// hubAddressCases are faults of addresses, flags, and missing programs.
func hubAddressCases(w *harness.Testbed, taken string) []hubMisconfiguration {
	return []hubMisconfiguration{
		{
			fault{name: "taken TCP port", says: []string{taken, "taken by another program", "ss -ltnp", "--listen"}},
			func(_ *testing.T, c *devcluster.HubConfig) { c.Listen = taken },
		},
		{
			fault{name: "taken UDP port", says: []string{"taken by another program", "ss -lunp", "--session-listen"}},
			func(_ *testing.T, c *devcluster.HubConfig) { c.SessionListen = w.Hub.Ready.SessionAddr },
		},
		{
			fault{name: "taken metrics port", says: []string{"taken by another program", "--metrics-listen"}},
			func(_ *testing.T, c *devcluster.HubConfig) {
				c.ExtraArgs = []string{"--metrics-listen", taken}
			},
		},
		{fault{name: "another machine's address", says: []string{
			"No interface of this machine has the address",
			"--listen",
		}}, func(_ *testing.T, c *devcluster.HubConfig) { c.Listen = "192.0.2.1:8443" }},
		{fault{name: "no PostgreSQL", hide: []string{"/usr/lib/postgresql"}, says: []string{
			"PostgreSQL is not installed",
			"apt-get install postgresql",
		}}, nil},
		{fault{name: "database that does not answer", says: []string{
			"database-url",
			"does not answer: check that it runs",
		}}, func(t *testing.T, c *devcluster.HubConfig) {
			file := filepath.Join(w.Dir, "database-url")
			require.NoError(t, os.WriteFile(file, []byte("postgres://nobody@"+harness.FreeAddress()+"/none\n"), 0o600))
			c.ExtraArgs = []string{"--database-url-file", file}
		}},
		{
			fault{name: "a flag that cannot be", says: []string{"--lease-duration must be between"}},
			func(_ *testing.T, c *devcluster.HubConfig) {
				c.ExtraArgs = []string{"--lease-duration", "1s"}
			},
		},
	}
}

// hubDataCases are faults of the data directory; at returns a hub's configuration in another directory.
func hubDataCases(w *harness.Testbed, at func(dir string) devcluster.HubConfig) []hubMisconfiguration {
	return []hubMisconfiguration{
		{
			fault{name: "never initialised", says: []string{"There is no data directory", "gpuaas-hub init"}},
			func(_ *testing.T, c *devcluster.HubConfig) { *c = at("nowhere") },
		},
		{
			fault{name: "data directory in use", says: []string{"Another gpuaas-hub works on the data directory", "stop it"}},
			func(_ *testing.T, c *devcluster.HubConfig) { c.Dir = w.Hub.Config.Dir },
		},
		{
			fault{name: "full disk", says: []string{"is full", "Free some space"}},
			func(t *testing.T, c *devcluster.HubConfig) {
				*c = at("small")
				w.SmallDisk(c.DataDir(), 8)
				_, err := devcluster.InitHub(w.Ctx, *c, harness.TrustDomain)
				require.NoError(t, err)
			},
		},
		{
			fault{name: "not one byte free", says: []string{"is full", "Free some space"}},
			func(t *testing.T, c *devcluster.HubConfig) {
				*c = at("none")
				w.SmallDisk(c.DataDir(), 1)
				_, err := devcluster.InitHub(w.Ctx, *c, harness.TrustDomain)
				require.NoError(t, err)
				w.Fill(c.DataDir(), 0)
			},
		},
		{
			fault{name: "another engine's data", says: []string{"made by another engine", "give this one another --data-dir"}},
			func(t *testing.T, c *devcluster.HubConfig) {
				*c = initialised(w, t, "engine", "cockroachdb 25\n")
			},
		},
		{
			fault{name: "another PostgreSQL's data", says: []string{"made by PostgreSQL 99", "apt-get install postgresql-99"}},
			func(t *testing.T, c *devcluster.HubConfig) {
				*c = initialised(w, t, "newer", "postgresql 99\n")
			},
		},
		{
			fault{name: "clock that is behind", says: []string{"This machine's clock is wrong", "timedatectl set-ntp true"}},
			func(t *testing.T, c *devcluster.HubConfig) {
				*c = initialised(w, t, "early", "")
				signBundle(w, *c, time.Now().Add(time.Hour))
			},
		},
		{
			fault{name: "root key in the data directory", says: []string{"lies inside the data directory", "Move it"}},
			func(t *testing.T, c *devcluster.HubConfig) {
				*c = initialised(w, t, "careless", "")
				keys, err := filepath.Glob(filepath.Join(c.KeyDir(), "root*"))
				require.NoError(t, err)
				require.Len(t, keys, 1)
				require.NoError(t, os.Rename(keys[0], filepath.Join(c.DataDir(), filepath.Base(keys[0]))))
			},
		},
	}
}

func TestTheHubReportsMisconfigurationsAndChangesNothing(t *testing.T) {
	w := harness.New(t)
	w.StartHub(w.HubConfig())
	good := w.HubConfig()
	good.Dir = filepath.Join(w.Dir, "second")
	_, err := devcluster.InitHub(w.Ctx, good, harness.TrustDomain)
	require.NoError(t, err)
	taken := strings.TrimPrefix(w.Hub.Ready.APIURL, "https://")
	at := func(dir string) devcluster.HubConfig {
		c := good
		c.Dir = filepath.Join(w.Dir, dir)
		return c
	}
	for _, c := range append(hubAddressCases(w, taken), hubDataCases(w, at)...) {
		t.Run(c.name, func(t *testing.T) {
			conf := good
			if c.change != nil {
				c.change(t, &conf)
			}
			if _, err := os.Stat(conf.DataDir()); err != nil || conf.Dir == w.Hub.Config.Dir {
				e, err := devcluster.TryHub(w.Ctx, conf, c.hide...)
				c.requireReported(t, e, err)
				return
			}
			before := fileStates(t, conf.DataDir(), conf.KeyDir())
			e, err := devcluster.TryHub(w.Ctx, conf, c.hide...)
			c.requireReported(t, e, err)
			require.Equal(t, before, fileStates(t, conf.DataDir(), conf.KeyDir()))
		})
	}
	// The running hub was not disturbed, and a second one starts with a correct configuration.
	_, err = scenario.JoinToken(w.Ctx, w.Admin())
	require.NoError(t, err)
	second, err := devcluster.StartHub(w.Ctx, good)
	require.NoError(t, err)
	require.NoError(t, second.Stop())
}

// initialised makes a hub's directory; engine, where given, is the content of the file that names its database engine.
func initialised(w *harness.Testbed, t *testing.T, name, engine string) devcluster.HubConfig {
	t.Helper()
	c := w.HubConfig()
	c.Dir = filepath.Join(w.Dir, name)
	_, err := devcluster.InitHub(w.Ctx, c, harness.TrustDomain)
	require.NoError(t, err)
	if engine != "" {
		root := filepath.Join(c.DataDir(), "postgres")
		require.NoError(t, os.Mkdir(root, 0o711))
		require.NoError(t, os.WriteFile(filepath.Join(root, "engine"), []byte(engine), 0o600))
	}
	return c
}

// signBundle signs the next trust bundle with the given time, so that the machine's clock appears to be wrong.
func signBundle(w *harness.Testbed, c devcluster.HubConfig, at time.Time) {
	w.T.Helper()
	dir := filepath.Join(c.DataDir(), "trust")
	text, err := os.ReadFile(filepath.Join(dir, "bundle-000001.json"))
	require.NoError(w.T, err)
	env, err := protocol.EnvelopeFromJSON(text)
	require.NoError(w.T, err)
	bundle := &protocol.TrustBundle{}
	require.NoError(w.T, proto.Unmarshal(env.GetPayload(), bundle))
	bundle.Version++
	bundle.IssuedAt = timestamppb.New(at)
	next, err := protocol.SignMessage(protocol.PayloadBundle, bundle, protocol.NewEd25519Signer(rootKey(w, c)))
	require.NoError(w.T, err)
	text, err = protocol.EnvelopeToJSON(next)
	require.NoError(w.T, err)
	require.NoError(w.T, os.WriteFile(filepath.Join(dir, "bundle-000002.json"), text, 0o600))
}

// rootKey opens the offline root key, with its passphrase.
func rootKey(w *harness.Testbed, c devcluster.HubConfig) ed25519.PrivateKey {
	w.T.Helper()
	passphrase, err := os.ReadFile(c.PassphraseFile())
	require.NoError(w.T, err)
	identity, err := age.NewScryptIdentity(string(passphrase))
	require.NoError(w.T, err)
	sealed, err := os.Open(filepath.Join(c.KeyDir(), "root.age"))
	require.NoError(w.T, err)
	defer func() { _ = sealed.Close() }()
	opened, err := age.Decrypt(sealed, identity)
	require.NoError(w.T, err)
	text, err := io.ReadAll(opened)
	require.NoError(w.T, err)
	block, _ := pem.Decode(text)
	require.NotNil(w.T, block)
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	require.NoError(w.T, err)
	key, ok := parsed.(ed25519.PrivateKey)
	require.True(w.T, ok)
	return key
}

// agentMisconfiguration is a fault of an agent's configuration or machine.
type agentMisconfiguration struct {
	fault
	change func(t *testing.T, c *devcluster.AgentConfig)
}

// machineCases are faults of the machine.
func machineCases(w *harness.Testbed) []agentMisconfiguration {
	return []agentMisconfiguration{
		{fault{name: "no containerd", says: []string{
			"There is no containerd socket", "apt-get install containerd",
			"--containerd-address",
		}}, func(_ *testing.T, c *devcluster.AgentConfig) {
			c.ContainerdAddress = filepath.Join(w.Dir, "absent.sock")
		}},
		{
			fault{name: "containerd that is dead", says: []string{"containerd does not answer", "systemctl start containerd"}},
			func(t *testing.T, c *devcluster.AgentConfig) {
				c.ContainerdAddress = filepath.Join(w.Dir, "dead.sock")
				l, err := net.ListenUnix("unix", &net.UnixAddr{Name: c.ContainerdAddress, Net: "unix"})
				require.NoError(t, err)
				l.SetUnlinkOnClose(false)
				require.NoError(t, l.Close())
			},
		},
		{fault{name: "no iptables", hide: []string{"/usr/sbin/iptables"}, says: []string{"apt-get install iptables"}}, nil},
		{fault{
			name: "no runc and no iptables", hide: []string{"/usr/sbin/runc", "/usr/sbin/iptables"},
			says: []string{"apt-get install iptables runc"},
		}, nil},
		{
			fault{name: "small disk", says: []string{"MiB free", "a node needs 256 MiB"}},
			func(_ *testing.T, c *devcluster.AgentConfig) {
				c.Dir = filepath.Join(w.Dir, "small")
				w.SmallDisk(c.DataDir(), 200)
			},
		},
		{fault{name: "full disk", says: []string{"Free some space"}}, func(_ *testing.T, c *devcluster.AgentConfig) {
			c.Dir = filepath.Join(w.Dir, "full")
			w.SmallDisk(c.DataDir(), 20)
		}},
		{
			fault{name: "not one byte free", says: []string{"is full: free some space", "--data-dir"}},
			func(_ *testing.T, c *devcluster.AgentConfig) {
				c.Dir = filepath.Join(w.Dir, "none")
				w.SmallDisk(c.DataDir(), 1)
				w.Fill(c.DataDir(), 0)
			},
		},
	}
}

// enrollmentCases are faults of enrollment and of flags.
func enrollmentCases(running *devcluster.Agent, usedToken, expired string) []agentMisconfiguration {
	return []agentMisconfiguration{
		{fault{name: "wrong root fingerprint", says: []string{
			"is not rooted in", "Compare the fingerprint",
			"gpuaas-hub trust show",
		}}, func(_ *testing.T, c *devcluster.AgentConfig) {
			c.RootFingerprint = "sha256:" + strings.Repeat("0", 64)
		}},
		{
			fault{name: "used join token", says: []string{"was used by another node", "Make a new one"}},
			func(_ *testing.T, c *devcluster.AgentConfig) { c.JoinToken = usedToken },
		},
		{
			fault{name: "expired join token", says: []string{"expired", "Make a new one"}},
			func(_ *testing.T, c *devcluster.AgentConfig) { c.JoinToken = expired },
		},
		{fault{name: "no address of a hub", says: []string{"--api-url"}}, func(_ *testing.T, c *devcluster.AgentConfig) {
			c.APIURL = ""
		}},
		{fault{name: "address without TLS", says: []string{"https://"}}, func(_ *testing.T, c *devcluster.AgentConfig) {
			c.APIURL = "http://127.0.0.1:1"
		}},
		{fault{name: "data directory in use", says: []string{
			"Another gpuaas-agent works on the data directory",
			"stop it first",
		}}, func(_ *testing.T, c *devcluster.AgentConfig) {
			c.Dir, c.RunDir = running.Config.Dir, running.Config.RunDir
			c.JoinToken = ""
		}},
		{
			fault{name: "a flag that cannot be", says: []string{"--port-range must look like"}},
			func(_ *testing.T, c *devcluster.AgentConfig) { c.PortRange = "9-1" },
		},
	}
}

func TestTheAgentReportsMisconfigurationsAndChangesNothing(t *testing.T) {
	w := harness.New(t)
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	running := w.StartAgent(w.AgentConfig("running"))
	good := w.AgentConfig("node")
	token, err := scenario.JoinToken(w.Ctx, w.Admin())
	require.NoError(t, err)
	good.JoinToken = token
	usedToken, err := os.ReadFile(filepath.Join(running.Config.Dir, "join-token"))
	require.NoError(t, err)
	expired, err := scenario.JoinToken(w.Ctx, w.Admin())
	require.NoError(t, err)
	expire(w, expired)
	awaitAccepted(w, running.Ready.NodeID)

	for _, c := range append(machineCases(w), enrollmentCases(running, string(usedToken), expired)...) {
		t.Run(c.name, func(t *testing.T) {
			conf := good
			if c.change != nil {
				c.change(t, &conf)
			}
			machine, rows := machineState(w), w.Rows()
			e, err := devcluster.TryAgent(w.Ctx, conf, c.hide...)
			c.requireReported(t, e, err)
			require.Empty(t, leakcheck.Diff(machine, machineState(w)))
			require.Equal(t, rows, w.Rows())
		})
	}
	// Corrected, the same directory and token work: no attempt has used them up.
	a, err := devcluster.StartAgent(w.Ctx, good)
	require.NoError(t, err)
	w.T.Cleanup(func() {
		require.NoError(t, a.Stop())
		require.NoError(t, devcluster.Uninstall(context.WithoutCancel(w.Ctx), good))
	})
	w.AwaitOnline(a.Ready.NodeID)
	require.NotEqual(t, running.Ready.NodeID, a.Ready.NodeID)
}

// awaitAccepted waits until the hub has recorded that the node accepted its newest state. After that nothing changes
// the node's row.
func awaitAccepted(w *harness.Testbed, nodeID string) {
	w.T.Helper()
	db := w.Database()
	w.Eventually("the node has accepted its newest state", func() error {
		var accepted bool
		err := db.QueryRow(w.Ctx, `SELECT (n.accepted_epoch, n.accepted_generation) = (s.epoch, s.generation)
			FROM nodes n JOIN node_states s ON s.node_id = n.id WHERE n.id = $1
			ORDER BY s.epoch DESC, s.generation DESC LIMIT 1`, nodeID).Scan(&accepted)
		return harness.Pending(err, accepted)
	})
	require.NoError(w.T, db.Close(w.Ctx))
}

// expire sets the end of a join token into the past.
func expire(w *harness.Testbed, token string) {
	w.T.Helper()
	digest := sha256.Sum256([]byte(token))
	tag, err := w.Database().Exec(w.Ctx, `UPDATE join_tokens SET expires_at = created_at WHERE secret_sha256 = $1`,
		digest[:])
	require.NoError(w.T, err)
	require.EqualValues(w.T, 1, tag.RowsAffected())
}

// machineState is what a node changes on its machine, files aside.
func machineState(w *harness.Testbed) leakcheck.Snapshot {
	w.T.Helper()
	s := w.Scope()
	s.Kinds = []leakcheck.Kind{
		leakcheck.Process, leakcheck.NetNS, leakcheck.Link, leakcheck.Route, leakcheck.Firewall,
		leakcheck.Cgroup, leakcheck.Containerd,
	}
	s.ContainerdAddress, s.Files = w.Containerd.Address, []string{filepath.Join(w.Dir, "hub", "keys")}
	snapshot, err := leakcheck.Take(s)
	require.NoError(w.T, err)
	return snapshot
}
