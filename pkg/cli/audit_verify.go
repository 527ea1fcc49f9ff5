package cli

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/auditchain"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// maxRecordBytes bounds a line of an export; the hub writes less than a megabyte.
const maxRecordBytes = 4 << 20

// exportAuditCommand writes a chain of the audit trail as it is hashed.
func (a *app) exportAuditCommand() *cobra.Command {
	var p client.ExportAuditParams
	c := a.action("export", "Write the records of an org as JSON Lines, oldest first, as they are hashed", cobra.NoArgs,
		func(ctx context.Context, s *session, _ []string) error {
			res, err := s.hub.ExportAudit(ctx, &p, s.editors()...)
			if err != nil {
				return err
			}
			defer func() { _ = res.Body.Close() }()
			s.progress.stop()
			_, err = io.Copy(s.env.Stdout, res.Body)
			return err
		})
	f := c.Flags()
	f.StringVar(&p.OrgID, "org", "", auditOrgUsage)
	f.Int64Var(&p.FromNumber, "from", 0, "first `number` (default: the first that the hub keeps)")
	f.Int64Var(&p.ToNumber, "to", 0, "last `number` (default: the last)")
	f.Var(timeFlag{&p.From}, "since", "from the first record of this time on (RFC 3339, or a span back from now)")
	f.Var(timeFlag{&p.To}, "until", "up to the last record before this time")
	return c
}

const auditOrgUsage = "`id` of the org (default: yours; of a platform admin: records of no org)"

// verified is what verify says of a chain.
type verified struct {
	OrgID string `json:"org_id,omitempty"`
	// From and To are the first and the last number; zero where there is none.
	From int64  `json:"from_number"`
	To   int64  `json:"to_number"`
	Head string `json:"head,omitempty"`
}

// verifyAuditCommand checks a chain of the audit trail, which the hub sends or a file has.
func (a *app) verifyAuditCommand() *cobra.Command {
	var (
		v    auditchain.Verifier
		p    client.ExportAuditParams
		head string
	)
	c := a.action("verify [FILE]", "Check that no record was changed, removed, added or moved", cobra.MaximumNArgs(1),
		func(ctx context.Context, s *session, _ []string) error {
			res, err := s.hub.ExportAudit(ctx, &p, s.editors()...)
			if err != nil {
				return err
			}
			defer func() { _ = res.Body.Close() }()
			if err := verifyLines(&v, res.Body); err != nil {
				return err
			}
			s.progress.stop()
			return a.showVerified(&v)
		})
	c.Long = `Reads the records from the hub, or from a file that "gpuaas audit export" wrote ("-": from stdin), and checks
numbers and hashes. It names the first record that is wrong or missing and ends with 1, or prints the head of the
chain. Keep the head: given later (--head), it shows whether the hub still has every record up to it. FILE needs no
hub.`
	fromHub := c.RunE
	c.RunE = func(cmd *cobra.Command, args []string) (err error) {
		if v.Saved, err = parseHead(head); err != nil {
			return usage(err)
		}
		if len(args) == 0 {
			return fromHub(cmd, args)
		}
		in := a.env.Stdin
		if args[0] != "-" {
			file, err := os.Open(args[0])
			if err != nil {
				return err
			}
			defer func() { _ = file.Close() }()
			in = file
		}
		if err := verifyLines(&v, in); err != nil {
			return err
		}
		return a.showVerified(&v)
	}
	f := c.Flags()
	f.StringVar(&p.OrgID, "org", "", auditOrgUsage)
	f.StringVar(&head, "head", "", "`NUMBER:HASH` that an earlier verify printed")
	return c
}

func verifyLines(v *auditchain.Verifier, in io.Reader) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxRecordBytes)
	for lines.Scan() {
		if err := v.Add(lines.Bytes()); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("after record %d: %w", v.Head().Number, err)
	}
	return v.End()
}

func (a *app) showVerified(v *auditchain.Verifier) error {
	out := verified{OrgID: v.OrgID(), From: v.First().Number, To: v.Head().Number}
	if out.To > 0 {
		out.Head = fmt.Sprintf("%d:%s", out.To, v.Head().Hash)
	}
	if a.output != "table" {
		return encode(a.env.Stdout, a.output, out)
	}
	return table(a.env.Stdout, []verified{out}, []column[verified]{
		{"ORG", func(r verified) string { return r.OrgID }},
		{"FROM", func(r verified) string { return strconv.FormatInt(r.From, 10) }},
		{"TO", func(r verified) string { return strconv.FormatInt(r.To, 10) }},
		{"HEAD", func(r verified) string { return r.Head }},
	})
}

// parseHead reads NUMBER:HASH; empty is none.
func parseHead(text string) (auditchain.Head, error) {
	if text == "" {
		return auditchain.Head{}, nil
	}
	number, hash, _ := strings.Cut(text, ":")
	n, err := strconv.ParseInt(number, 10, 64)
	raw, hexErr := hex.DecodeString(hash)
	if err != nil || hexErr != nil || n < 1 || len(raw) != 32 {
		return auditchain.Head{}, errors.New("--head is NUMBER:HASH, as verify prints it")
	}
	return auditchain.Head{Number: n, Hash: hex.EncodeToString(raw)}, nil
}
