package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

func versionColumns() []column[client.AppVersion] {
	return []column[client.AppVersion]{
		{"APP", func(v client.AppVersion) string { return v.AppSlug }},
		{"VERSION", func(v client.AppVersion) string { return v.Version }},
		{"STATUS", func(v client.AppVersion) string {
			if v.CanaryPercent > 0 {
				return fmt.Sprintf("%s %d %%", v.Status, v.CanaryPercent)
			}
			return string(v.Status)
		}},
		{"PUBLISHED", func(v client.AppVersion) string { return stamp(v.PublishedAt) }},
		{"PUBLISHER KEY", func(v client.AppVersion) string { return v.PublisherKeyID[:min(12, len(v.PublisherKeyID))] }},
	}
}

func (a *app) appsCommand() *cobra.Command {
	columns := []column[client.App]{
		{"SLUG", func(p client.App) string { return p.Slug }},
		{"NAME", func(p client.App) string { return p.DisplayName }},
		{"CATEGORY", func(p client.App) string { return p.Category }},
		{"BACKEND", func(p client.App) string { return string(p.RuntimeBackend) }},
		{"LATEST", func(p client.App) string { return p.LatestVersion }},
	}
	var entitled bool
	list := listing(a, "list", "Apps of the catalogue", cobra.NoArgs, columns, func(ctx context.Context, s *session,
		_ []string, cursor string,
	) (_ *http.Response, err error) {
		p := client.ListAppsParams{Cursor: cursor, Limit: client.PageSize}
		if entitled {
			if p.ProjectID, err = s.projectID(ctx); err != nil {
				return nil, err
			}
		}
		return s.hub.ListApps(ctx, &p, s.editors()...)
	})
	list.Flags().BoolVar(&entitled, "entitled", false, "only those that the project may launch")
	return group("apps", "Apps of the catalogue", list, a.slugsCommand(), a.releaseSlugCommand(), a.transferSlugCommand(),
		a.targetsCommand(),
		listing(a, "versions APP", "Versions of an app, newest first", cobra.ExactArgs(1), versionColumns(),
			func(ctx context.Context, s *session, args []string, cursor string) (*http.Response, error) {
				return s.hub.ListAppVersions(ctx, args[0],
					&client.ListAppVersionsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
			}),
		a.action("registry", "Where images are pushed and pulled", cobra.NoArgs, func(ctx context.Context, s *session,
			_ []string,
		) error {
			r, err := client.Read[client.Registry](s.hub.GetRegistry(ctx, s.editors()...))
			if err != nil {
				return err
			}
			return show(s, r, []column[client.Registry]{
				{"HOST", func(r client.Registry) string { return r.RegistryHost }},
				{"NAMESPACES", func(r client.Registry) string { return string(r.NamespaceMode) }},
				{"DIGEST ONLY", func(r client.Registry) string { return fmt.Sprint(r.DigestOnly) }},
			})
		}))
}

func (a *app) versionsCommand() *cobra.Command {
	var (
		status  string
		percent int32
	)
	promote := a.moveCommand("promote", "Let some launch a version before all", func(ctx context.Context, s *session,
		app, version, reason string,
	) (*http.Response, error) {
		return s.hub.PromoteAppVersion(ctx, app, version, client.AppVersionPromote{
			Status: client.AppVersionPromoteStatus(status), CanaryPercent: percent, Reason: reason,
		}, s.editors()...)
	})
	promote.Flags().StringVar(&status, "to", "", "staged (the app's org and platform admins launch it) or canary (a "+
		"share of the projects, too)")
	promote.Flags().Int32Var(&percent, "percent", 0, "share of the projects that may launch a canary, 1 to 100")
	_ = promote.MarkFlagRequired("to") // exists
	return group("versions", "Promote, publish, deprecate and retire app versions (platform admin)", promote,
		a.moveCommand("publish", "Make a version launchable by every entitled project", move(
			(*client.Hub).PublishAppVersion)),
		a.moveCommand("deprecate", "Close a version for new instances", move((*client.Hub).DeprecateAppVersion)),
		a.moveCommand("retire", "End a version that no app instance has", move((*client.Hub).RetireAppVersion)))
}

// versionCall changes the status of a version.
type versionCall func(ctx context.Context, s *session, app, version, reason string) (*http.Response, error)

func move(call func(hub *client.Hub, ctx context.Context, app, version string, body client.AppVersionMove,
	editors ...client.RequestEditorFn) (*http.Response, error),
) versionCall {
	return func(ctx context.Context, s *session, app, version, reason string) (*http.Response, error) {
		return call(s.hub, ctx, app, version, client.AppVersionMove{Reason: reason}, s.editors()...)
	}
}

func (a *app) moveCommand(verb, short string, call versionCall) *cobra.Command {
	var reason string
	c := a.action(verb+" APP VERSION", short, cobra.ExactArgs(2), func(ctx context.Context, s *session,
		args []string,
	) error {
		return showAnswer(s, versionColumns())(call(ctx, s, args[0], args[1], reason))
	})
	c.Flags().StringVar(&reason, "reason", "", "why")
	return c
}

func (a *app) manifestsCommand() *cobra.Command {
	var keyFile, signKeyFile string
	register := a.action("register FILE", "Register a signed manifest, or sign one and register it", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, args []string) error {
			envelope, err := s.manifestEnvelope(args[0], keyFile)
			if err != nil {
				return err
			}
			return showAnswer(s, versionColumns())(s.hub.RegisterManifest(ctx,
				client.ManifestRegister{ManifestEnvelope: envelope}, s.editors()...))
		})
	register.Flags().StringVar(&keyFile, "key", "", "publisher's private key (PEM): FILE is the manifest itself and is "+
		"signed now")
	sign := &cobra.Command{
		Use: "sign FILE", Short: "Check a manifest and sign it; nothing leaves this machine",
		Args: checked(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			text, err := a.signManifest(args[0], signKeyFile)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.env.Stdout, string(text))
			return err
		},
	}
	sign.Flags().StringVar(&signKeyFile, "key", "", "publisher's private key (PEM)")
	return group("manifests", "App manifests", a.fromComposeCommand(), register, sign)
}

func (s *session) manifestEnvelope(path, keyFile string) (client.SignedEnvelope, error) {
	if keyFile == "" {
		return readEnvelope(s.app, path)
	}
	text, err := s.signManifest(path, keyFile)
	if err != nil {
		return client.SignedEnvelope{}, err
	}
	var envelope client.SignedEnvelope
	return envelope, json.Unmarshal(text, &envelope)
}

func (a *app) signManifest(path, keyFile string) ([]byte, error) {
	doc, err := readInput(a.env.Stdin, path)
	if err != nil {
		return nil, usage(err)
	}
	signer, err := publisherKey(keyFile)
	if err != nil {
		return nil, err
	}
	return appkit.SignManifest(doc, signer)
}

func readEnvelope(a *app, path string) (client.SignedEnvelope, error) {
	var envelope client.SignedEnvelope
	text, err := readInput(a.env.Stdin, path)
	if err != nil {
		return envelope, usage(err)
	}
	if err := json.Unmarshal(text, &envelope); err != nil || envelope.PayloadType == "" {
		return envelope, usage(fmt.Errorf("%s is not a signed envelope (DSSE in JSON)", path))
	}
	return envelope, nil
}

func publisherKey(path string) (protocol.Signer, error) {
	if path == "" {
		return nil, usage(errors.New("--key is missing: the publisher's private key; gpuaas publishers keygen makes one"))
	}
	return appkit.LoadKey(path)
}

func (a *app) publishersCommand() *cobra.Command {
	columns := []column[client.Publisher]{
		{"KEY", func(p client.Publisher) string { return p.KeyID }},
		{"ORG", func(p client.Publisher) string { return p.OrgSlug }},
		{"REPOSITORIES", func(p client.Publisher) string { return joined(p.RepositoryPrefixes) }},
		{"STATUS", func(p client.Publisher) string { return string(p.Status) }},
		{"EXPIRES", func(p client.Publisher) string { return stamp(p.ExpiresAt) }},
	}
	return group("publishers", "Who may sign manifests and images",
		a.keygenCommand(),
		a.action("register DELEGATION_FILE", "Hand in what gpuaas-hub trust delegate wrote", cobra.ExactArgs(1),
			func(ctx context.Context, s *session, args []string) error {
				delegation, err := readEnvelope(s.app, args[0])
				if err != nil {
					return err
				}
				return showAnswer(s, columns)(s.hub.RegisterPublisher(ctx,
					client.PublisherRegister{Delegation: delegation}, s.editors()...))
			}),
		listing(a, "list", "Publishers", cobra.NoArgs, columns, func(ctx context.Context, s *session, _ []string,
			cursor string,
		) (*http.Response, error) {
			return s.hub.ListPublishers(ctx,
				&client.ListPublishersParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		}))
}

func (a *app) keygenCommand() *cobra.Command {
	return &cobra.Command{
		Use: "keygen PRIVATE.pem PUBLIC.pem", Short: "Make a publisher's key; nothing leaves this machine",
		Args: checked(cobra.ExactArgs(2)),
		RunE: func(_ *cobra.Command, args []string) error {
			signer, err := appkit.GenerateKey(args[0], args[1])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.env.Stdout, signer.KeyID())
			return err
		},
	}
}

func (a *app) entitlementsCommand() *cobra.Command {
	columns := []column[client.Entitlement]{
		{"APP", func(e client.Entitlement) string { return e.AppSlug }},
		{"ENABLED", func(e client.Entitlement) string { return fmt.Sprint(e.Enabled) }},
		{"VERSIONS", func(e client.Entitlement) string { return joined(e.PolicyOverrides.AllowedVersions) }},
		{"MODES", func(e client.Entitlement) string { return joined(e.PolicyOverrides.AllowedOperatingModes) }},
		{"SCOPES", func(e client.Entitlement) string { return joined(e.PolicyOverrides.AllowedControlPlaneScopes) }},
		{"UPDATED", func(e client.Entitlement) string { return stamp(e.UpdatedAt) }},
	}
	var (
		disable                 bool
		modes, scopes, versions []string
		accelerators            int32
	)
	set := a.projectAction("set APP", "Grant, narrow or withdraw an app for the project", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, project string, args []string) error {
			body := client.EntitlementPut{Enabled: !disable, PolicyOverrides: client.PolicyOverrides{
				AllowedVersions: versions,
				MaxAccelerators: accelerators,
			}}
			for _, m := range modes {
				body.PolicyOverrides.AllowedOperatingModes = append(body.PolicyOverrides.AllowedOperatingModes,
					client.OperatingMode(m))
			}
			for _, c := range scopes {
				body.PolicyOverrides.AllowedControlPlaneScopes = append(body.PolicyOverrides.AllowedControlPlaneScopes,
					client.ControlPlaneScope(c))
			}
			return showAnswer(s, columns)(s.hub.PutEntitlement(ctx, project, args[0], body, s.editors()...))
		})
	f := set.Flags()
	f.BoolVar(&disable, "disable", false, "withdraw it")
	f.StringSliceVar(&modes, "operating-mode", nil, "only these modes")
	f.StringSliceVar(&scopes, "control-plane-scope", nil, "only these scopes")
	f.StringSliceVar(&versions, "version", nil, "only these versions")
	f.Int32Var(&accelerators, "max-accelerators", 0, "at most so many accelerators; 0 means no limit")
	return group("entitlements", "What the project may launch", set,
		projectListing(a, "list", "Entitlements of the project", cobra.NoArgs, columns, func(ctx context.Context, s *session,
			project string, _ []string, cursor string,
		) (*http.Response, error) {
			return s.hub.ListEntitlements(ctx, project,
				&client.ListEntitlementsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		}))
}
