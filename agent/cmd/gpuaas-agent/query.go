package main

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/agent/internal/local"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxApplyBytes bounds a document that apply reads.
const maxApplyBytes = 12 << 20

// query is a command that asks the running agent.
type query struct {
	socket string
	output string
}

func (q *query) command(use, short string, do func(ctx context.Context, c *local.Client, args []string,
	out io.Writer) error,
) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Args: cobra.ExactArgs(strings.Count(use, " ")),
		RunE: func(cmd *cobra.Command, args []string) error {
			client := local.NewClient(q.socket)
			defer client.Close()
			return do(cmd.Context(), client, args, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&q.socket, "local-socket", defaultSocket, "Unix socket of the running agent")
	daemon.ChoiceVarP(cmd.Flags(), &q.output, "output", "o", "table", []string{"table", "json"}, "table or json")
	return cmd
}

// show prints value as JSON, or as the table that rows makes.
func (q *query) show(out io.Writer, value any, rows func(w io.Writer)) error {
	if q.output == "json" {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(value)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	rows(w)
	return w.Flush()
}

func newStatus() *cobra.Command {
	q := &query{}
	return q.command("status", "Show how the node stands", func(ctx context.Context, c *local.Client, _ []string,
		out io.Writer,
	) error {
		s, err := c.Status(ctx)
		if err != nil {
			return err
		}
		return q.show(out, s, func(w io.Writer) {
			hub := "no session since " + ago(s.Time, s.Hub.Since)
			if s.Hub.Connected {
				hub = "connected to " + s.Hub.HubAddr
			}
			row(w, "Node", s.NodeID)
			row(w, "Agent", s.AgentVersion)
			row(w, "Hub", hub)
			if s.Hub.LastError != "" {
				row(w, "Last error", s.Hub.LastError)
			}
			if s.Hub.Quarantined != "" {
				row(w, "Quarantined", s.Hub.Quarantined)
			}
			if s.Hub.LastRefusal != "" {
				row(w, "Last refusal", s.Hub.LastRefusal)
			}
			row(w, "State", fmt.Sprintf("epoch %d, generation %d, %d workloads", s.Epoch, s.Generation, s.Workloads))
			row(w, "Trust", fmt.Sprintf("%s, bundle %d", s.TrustDomain, s.BundleVersion))
			row(w, "Usage", fmt.Sprintf("%d segments sealed, %d posted, %d bytes unsent", s.Usage.LastSegment,
				s.Usage.Marks.Posted, s.Usage.UnsentBytes))
			for _, key := range slices.Sorted(maps.Keys(s.Unverified)) {
				row(w, "Unverified", key+": "+s.Unverified[key])
			}
			row(w, "Conditions", cmp.Or(strings.Join(s.Conditions, ", "), "-"))
		})
	})
}

func newWorkloads() *cobra.Command {
	q := &query{}
	return q.command("workloads", "Show what runs on the node", func(ctx context.Context, c *local.Client, _ []string,
		out io.Writer,
	) error {
		list, err := c.Workloads(ctx)
		if err != nil {
			return err
		}
		return q.show(out, list, func(w io.Writer) {
			row(w, "MEMBER", "APP", "STATUS", "REASON", "RESTARTS", "ENDPOINTS")
			for _, x := range list {
				var urls []string
				for _, e := range x.Endpoints {
					urls = append(urls, e.URL)
				}
				row(w, x.MemberID, cmp.Or(strings.TrimSpace(x.AppSlug+" "+x.AppVersion), "-"), x.Status, cmp.Or(x.Reason, "-"),
					fmt.Sprint(x.Restarts), cmp.Or(strings.Join(urls, " "), "-"))
				for _, s := range x.Services {
					row(w, "  "+s.Name, "", s.Status, cmp.Or(s.Reason, "-"), fmt.Sprint(s.Restarts), "")
				}
			}
		})
	})
}

func newVerify() *cobra.Command {
	q := &query{}
	return q.command("verify", "Check all signatures and digests again", func(ctx context.Context, c *local.Client,
		_ []string, out io.Writer,
	) error {
		checks, err := c.Verify(ctx)
		if err != nil {
			return err
		}
		bad := 0
		for _, x := range checks {
			if !x.OK {
				bad++
			}
		}
		err = q.show(out, checks, func(w io.Writer) {
			for _, x := range checks {
				verdict := "ok"
				if !x.OK {
					verdict = "FAILED"
				}
				row(w, verdict, x.Subject, x.What, x.Detail)
			}
		})
		if err == nil && bad > 0 {
			err = fault.New(fault.Conflict, codeVerifyFailed, fmt.Sprintf("%d of %d checks failed.", bad, len(checks)), nil)
		}
		return err
	})
}

func newLogs() *cobra.Command {
	q := &query{}
	var service string
	var tail int
	var follow bool
	cmd := q.command("logs MEMBER", "Show the log of a workload", func(ctx context.Context, c *local.Client, args []string,
		out io.Writer,
	) error {
		log, err := c.Logs(ctx, local.LogsQuery{MemberID: args[0], Service: service, TailLines: tail, Follow: follow})
		if err != nil {
			return err
		}
		defer func() { _ = log.Close() }()
		if _, err := io.Copy(out, log); err != nil && ctx.Err() == nil {
			return err
		}
		return nil
	})
	cmd.Flags().StringVar(&service, "service", "", "one service of the workload (default: the first)")
	cmd.Flags().IntVar(&tail, "tail", 100, "how many of the last lines")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what is written")
	return cmd
}

func newKeys() *cobra.Command {
	q := &query{}
	cmd := q.command("keys USER", "Print the SSH keys with which tenants log in to an account", func(ctx context.Context,
		c *local.Client, args []string, out io.Writer,
	) error {
		lines, err := c.Keys(ctx, args[0])
		if err != nil {
			return err
		}
		return q.show(out, lines, func(w io.Writer) {
			for _, line := range lines {
				row(w, line)
			}
		})
	})
	cmd.Long = `Prints lines of authorized_keys, for AuthorizedKeysCommand of sshd: the keys of the signed desired state
for this account of the machine, and none where the owner's policy does not list the account (ssh_users).`
	return cmd
}

func newApply() *cobra.Command {
	q := &query{}
	cmd := q.command("apply FILE", "Hand a signed document to the node, as a hub would", func(ctx context.Context,
		c *local.Client, args []string, out io.Writer,
	) error {
		d, err := readDocument(args[0])
		if err != nil {
			return err
		}
		applied, err := c.Apply(ctx, d)
		if err != nil {
			return err
		}
		return q.show(out, applied, func(w io.Writer) {
			row(w, "accepted", applied.Document, fmt.Sprintf("epoch %d, generation %d", applied.Epoch, applied.Generation))
		})
	})
	cmd.Long = `Takes a desired state, leases or a trust bundle as a DSSE envelope in JSON. The parts of a
desired state lie beside it, each in FILE.parts/<sha256 in hex>. The node checks it as if the hub
had sent it, and tells the hub of a refusal.`
	return cmd
}

func newImages() *cobra.Command {
	q := &query{}
	return q.command("images", "Show the images that the node has", func(ctx context.Context, c *local.Client, _ []string,
		out io.Writer,
	) error {
		list, err := c.Images(ctx)
		if err != nil {
			return err
		}
		return q.show(out, list, func(w io.Writer) {
			row(w, "IMAGE", "COMPRESSED", "IN USE", "PINNED")
			for _, i := range list {
				row(w, i.Name, fmt.Sprintf("%d MiB", i.SizeBytes>>20), yesNo(i.InUse), yesNo(i.Pinned))
			}
		})
	})
}

func yesNo(is bool) string {
	if is {
		return "yes"
	}
	return "no"
}

func newPinImage(pinned bool) *cobra.Command {
	use, short, done := "pin-image IMAGE", "Keep an image on the node where space is short", "is pinned"
	if !pinned {
		use, short, done = "unpin-image IMAGE", "Let an unused image go where space is short", "is no longer pinned"
	}
	q := &query{}
	return q.command(use, short, func(ctx context.Context, c *local.Client, args []string, out io.Writer) error {
		p := local.Pin{Name: args[0], Pinned: pinned}
		if err := c.PinImage(ctx, p); err != nil {
			return err
		}
		return q.show(out, p, func(w io.Writer) { row(w, p.Name, done) })
	})
}

func newReleaseAccelerator() *cobra.Command {
	q := &query{}
	cmd := q.command("release-accelerator ID", "Take a repaired accelerator out of quarantine", func(ctx context.Context,
		c *local.Client, args []string, out io.Writer,
	) error {
		if err := c.ReleaseAccelerator(ctx, args[0]); err != nil {
			return err
		}
		return q.show(out, map[string]string{"accelerator": args[0], "health": protocol.HealthTesting}, func(w io.Writer) {
			row(w, args[0], "is tested, and is given to containers again where it works")
		})
	})
	cmd.Long = `Says that an accelerator was repaired, or reset by hand. It is watched and tested as after a reset by
the agent (run --accelerator-test), and its past resets no longer count. No container may have it.`
	return cmd
}

func readDocument(path string) (local.Document, error) {
	raw, err := readBounded(path, maxApplyBytes)
	if err != nil {
		return local.Document{}, err
	}
	if !json.Valid(raw) {
		return local.Document{}, protocol.Refuse(protocol.Nack_MALFORMED, "%s is not JSON", path)
	}
	d := local.Document{Envelope: raw}
	entries, err := os.ReadDir(path + ".parts")
	if err != nil && !os.IsNotExist(err) {
		return local.Document{}, err
	}
	for _, e := range entries {
		if sum, err := hex.DecodeString(e.Name()); err != nil || len(sum) != 32 {
			continue
		}
		part, err := readBounded(filepath.Join(path+".parts", e.Name()), protocol.MaxWorkloadBytes+1)
		if err != nil {
			return local.Document{}, err
		}
		d.Parts = append(d.Parts, part)
	}
	return d, nil
}

func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	raw, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(raw)) > limit {
		err = protocol.Refuse(protocol.Nack_TOO_LARGE, "%s has over %d bytes", path, limit)
	}
	return raw, err
}

func row(w io.Writer, cells ...string) { _, _ = fmt.Fprintln(w, strings.Join(cells, "\t")) }

func ago(now, then time.Time) string {
	if then.IsZero() {
		return "the start"
	}
	return now.Sub(then).Round(time.Second).String() + " ago"
}
