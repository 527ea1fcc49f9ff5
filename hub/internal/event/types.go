package event

import "slices"

// Types lists every type of event that the hub writes, as asyncapi.yaml describes them. Append refuses any other.
func Types() []string {
	return append(fleetTypes(), []string{
		"apps.instance.requested",
		"apps.instance.deploying",
		"apps.instance.image_pull",
		"apps.instance.running",
		"apps.instance.upgrade_requested",
		"apps.instance.upgraded",
		"apps.instance.rollback_requested",
		"apps.instance.rolled_back",
		"apps.instance.start_requested",
		"apps.instance.stop_requested",
		"apps.instance.stopped",
		"apps.instance.decommission_requested",
		"apps.instance.decommissioned",
		"apps.instance.failed",
		"apps.instance.changed",
		"apps.instance.adopted",
		"iam.user.created",
		"iam.user.disabled",
		"iam.user.enabled",
		"iam.user.roles_changed",
		"iam.user.project_roles_changed",
		"iam.user.removed",
		"iam.user.tokens_revoked",
		"iam.user_token.created",
		"iam.user_token.revoked",
		"iam.org.created",
		"iam.org.quota_changed",
		"iam.project.created",
		"iam.service_account.created",
		"iam.service_account.disabled",
		"iam.service_account.key_rotated",
		"iam.service_account.deleted",
		"apps.artifact.publish_requested",
		"apps.artifact.registered",
		"apps.artifact.activated",
		"apps.version.registered",
		"apps.version.published",
		"apps.version.deprecated",
		"apps.entitlement.updated",
		"apps.publisher.registered",
		"apps.slug.released",
		"apps.slug.transferred",
		"capacity.allocation.pending",
		"capacity.allocation.active",
		"capacity.allocation.releasing",
		"capacity.allocation.released",
		"capacity.allocation.node_lost",
		"capacity.sku.created",
		"capacity.sku.retired",
		"billing.credit.granted",
		"billing.price.created",
	}...)
}

// fleetTypes are those of nodes and of the hub itself.
func fleetTypes() []string {
	return []string{
		"fleet.join_token.created",
		"fleet.node.enrolled",
		"fleet.node.certificate_renewed",
		"fleet.node.online",
		"fleet.node.offline",
		"fleet.node.draining",
		"fleet.node.undrained",
		"fleet.node.banned",
		"fleet.node.removed",
		"fleet.node.lost",
		"fleet.node.quarantined",
		"fleet.node.released",
		"fleet.node.document_refused",
		"fleet.node.adopted",
		"fleet.node.recovered",
		"hub.backup.verified",
		"hub.restored",
		"hub.recovery.finding",
		"hub.recovery.finding_resolved",
	}
}

func knownType(t string) bool { return slices.Contains(Types(), t) }
