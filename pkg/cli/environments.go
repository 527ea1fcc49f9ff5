package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// environmentsCommand manages the Python packages that nodes keep for a project.
func (a *app) environmentsCommand() *cobra.Command {
	columns := []column[client.Environment]{
		{"DIGEST", func(e client.Environment) string { return e.Digest }},
		{"NODE", func(e client.Environment) string { return e.NodeID }},
		{"MIB", func(e client.Environment) string { return strconv.FormatInt(e.SizeBytes>>20, 10) }},
		{"LAST USED", func(e client.Environment) string { return stamp(e.LastUsedAt) }},
		{"INSTANCES", func(e client.Environment) string { return strconv.Itoa(len(e.UsedBy)) }},
		{"REQUIREMENTS", func(e client.Environment) string { return strings.Join(e.Requirements, " ") }},
	}
	list := projectListing(a, "list", "Environments that nodes keep for the project", cobra.NoArgs, columns,
		func(ctx context.Context, s *session, project string, _ []string, cursor string) (*http.Response, error) {
			return s.hub.ListEnvironments(ctx, project,
				&client.ListEnvironmentsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		})
	var node string
	remove := a.projectAction("delete DIGEST", "Remove an environment that no app instance uses", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, project string, args []string) error {
			found := false
			var failed []error
			for e, err := range client.All[client.Environment](func(cursor string) (*http.Response, error) {
				return s.hub.ListEnvironments(ctx, project,
					&client.ListEnvironmentsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
			}) {
				if err != nil {
					return err
				}
				if e.Digest != args[0] || node != "" && e.NodeID != node {
					continue
				}
				found = true
				if err := closed(s.hub.DeleteEnvironment(ctx, project, e.Digest, e.NodeID, s.editors()...)); err != nil {
					failed = append(failed, fmt.Errorf("node %s: %w", e.NodeID, err))
				}
			}
			if !found {
				return &client.Problem{Status: http.StatusNotFound, Code: "not_found", Detail: "No node keeps such an " +
					"environment for the project; gpuaas environments list shows what there is."}
			}
			return errors.Join(failed...)
		})
	remove.Flags().StringVar(&node, "node", "", "id of the node (default: every node that keeps it)")
	return group("environments", "Python packages that nodes keep for the project", list, remove, a.packageIndexCommand())
}

// packageIndexCommand manages where environments get their packages from.
func (a *app) packageIndexCommand() *cobra.Command {
	columns := []column[client.PackageIndex]{
		{"URL", func(i client.PackageIndex) string { return i.URL }},
		{"USERNAME", func(i client.PackageIndex) string { return i.Username }},
		{"UPDATED", func(i client.PackageIndex) string { return stamp(i.UpdatedAt) }},
	}
	get := a.projectAction("get", "The package index of the project", cobra.NoArgs,
		func(ctx context.Context, s *session, project string, _ []string) error {
			return showAnswer(s, columns)(s.hub.GetPackageIndex(ctx, project, s.editors()...))
		})
	var username, passwordFile, caFile string
	set := a.projectAction("set URL", "Let environments get their packages from an index", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, project string, args []string) error {
			body := client.PackageIndexPut{URL: args[0], Username: username}
			if u, err := url.Parse(args[0]); err == nil && u.User != nil {
				return usage(errors.New("put no credentials into the URL: other users of this machine see arguments"))
			}
			if passwordFile != "" {
				text, err := readInput(s.env.Stdin, passwordFile)
				if err != nil {
					return usage(err)
				}
				body.Password = strings.TrimRight(string(text), "\r\n")
			}
			if caFile != "" {
				text, err := os.ReadFile(caFile)
				if err != nil {
					return usage(err)
				}
				body.CaPem = string(text)
			}
			return showAnswer(s, columns)(s.hub.PutPackageIndex(ctx, project, body, s.editors()...))
		})
	set.Flags().StringVar(&username, "username", "", "username for the index")
	set.Flags().StringVar(&passwordFile, "password-file", "", "file with the password; - for stdin")
	set.Flags().StringVar(&caFile, "ca", "", "file with the certificates that the index is trusted by, in PEM")
	remove := a.projectAction("delete", "Leave environments to pip's own index", cobra.NoArgs,
		func(ctx context.Context, s *session, project string, _ []string) error {
			return closed(s.hub.DeletePackageIndex(ctx, project, s.editors()...))
		})
	return group("index", "Where the environments of the project get their packages from", get, set, remove)
}
